/* load: requests over TLS, straight or inside CONNECT, as fast as answers come. One thread, epoll, loopback only.
 *
 *   cc -O2 -o load load.c -lssl -lcrypto
 *   load --to PORT --host NAME --path /small --ca FILE [--proxy PORT] [--connect-header LINE] [--header LINE]
 *        [--clients N] [--warm SECONDS] [--seconds SECONDS] [--fresh] [--pause MILLISECONDS]
 *
 * Each client sends one request, reads the whole answer, and sends the next, after --pause where it is given. --fresh: a new TCP connection, CONNECT and
 * full TLS handshake for every request. The certificate is verified for --host, so an engine that intercepts has to
 * mint a right one. An answer counts in the window between --warm and --warm + --seconds by when it ended; one that is
 * not 200, is cut or is not whole counts as an error. Latency runs from the request's first byte (--fresh: from
 * connect()) to the answer's last.
 *
 * Prints one line of JSON; "answers_ever" counts from the start, warming included. Exit 0 also where requests failed: the caller reads "errors" and "first_error".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum stage { CONNECTING, ASK_TUNNEL, AWAIT_TUNNEL, HANDSHAKE, ASK, AWAIT_HEAD, AWAIT_BODY, PAUSED, OVER };
enum { HEAD_BYTES = 16384, MAX_CLIENTS = 1024, MAX_ERRORS = 1000 };
enum { AGAIN = -1, BROKEN = -2 };

struct client {
    int fd;
    enum stage stage;
    SSL *tls;
    double began;
    size_t sent;             /* of what is being written */
    size_t head;             /* bytes in `bytes` */
    long left;               /* of the body; only when not chunked */
    int status, chunked, closing;
    char tail[5];            /* the last body bytes, to see where chunks end */
    char bytes[HEAD_BYTES + 1];
};

static int to_port, proxy_port, clients = 1, fresh;
static double warm = 0.3, seconds = 2, between;
static const char *host, *path = "/", *ca_file, *connect_header = "", *header = "";
static char request[4096], connect_request[4096];
static size_t request_size, connect_size;
static SSL_CTX *tls_context;
static int epoll_fd;
static double window_start, window_end;
static double *latencies;
static size_t latency_count, latency_room = 1 << 16;
static long answers, answers_ever, errors, body_bytes, connections;
static char first_error[160];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void hang_up(struct client *c) {
    if (c->tls) SSL_free(c->tls);
    c->tls = NULL;
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void dial(struct client *c) {
    hang_up(c);
    c->began = now();
    if (c->began > window_end) { c->stage = OVER; return; }
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (fresh) { /* a reset at the end, or the loopback runs out of ports in TIME_WAIT */
        struct linger reset = {1, 0};
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    }
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(proxy_port ? proxy_port : to_port)),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    connections++;
    c->stage = CONNECTING;
    c->head = c->sent = 0;
    connect(c->fd, (struct sockaddr *)&at, sizeof at);
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static void failed(struct client *c, const char *what) {
    if (!*first_error) {
        unsigned long code = ERR_get_error();
        snprintf(first_error, sizeof first_error, "%s%s%.100s", what, code ? ": " : "",
                 code ? ERR_reason_error_string(code) : "");
    }
    ERR_clear_error();
    errors++;
    if (errors >= MAX_ERRORS) { hang_up(c); c->stage = OVER; return; }
    dial(c);
}

static int tls_result(struct client *c, int r) {
    int e = SSL_get_error(c->tls, r);
    return e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE ? AGAIN : BROKEN;
}

static int take(struct client *c, char *into, size_t room) {
    if (c->tls) {
        int r = SSL_read(c->tls, into, (int)room);
        return r > 0 ? r : tls_result(c, r);
    }
    ssize_t r = recv(c->fd, into, room, 0);
    return r > 0 ? (int)r : r < 0 && errno == EAGAIN ? AGAIN : BROKEN;
}

/* 1: all of it is written; AGAIN; BROKEN. */
static int give(struct client *c, const char *from, size_t size) {
    while (c->sent < size) {
        int r;
        if (c->tls) {
            r = SSL_write(c->tls, from + c->sent, (int)(size - c->sent));
            if (r <= 0) return tls_result(c, r);
        } else {
            ssize_t w = send(c->fd, from + c->sent, size - c->sent, MSG_NOSIGNAL);
            if (w <= 0) return w < 0 && errno == EAGAIN ? AGAIN : BROKEN;
            r = (int)w;
        }
        c->sent += (size_t)r;
    }
    c->sent = 0;
    return 1;
}

static void begin_tls(struct client *c) {
    c->tls = SSL_new(tls_context);
    SSL_set_fd(c->tls, c->fd);
    SSL_set_tlsext_host_name(c->tls, host);
    SSL_set1_host(c->tls, host);
    SSL_set_connect_state(c->tls);
    c->stage = HANDSHAKE;
}

/* Take in body bytes; 1 when the answer is whole. */
static int body(struct client *c, const char *data, size_t size) {
    double t = now();
    if (t >= window_start && t <= window_end) body_bytes += (long)size;
    if (!c->chunked) return (c->left -= (long)size) <= 0;
    if (size >= 5) memcpy(c->tail, data + size - 5, 5);
    else {
        memmove(c->tail, c->tail + size, 5 - size);
        memcpy(c->tail + 5 - size, data, size);
    }
    return memcmp(c->tail, "0\r\n\r\n", 5) == 0;
}

static void answered(struct client *c) {
    double t = now();
    answers_ever++;
    if (t >= window_start && t <= window_end) {
        if (c->status == 200) answers++;
        else {
            errors++;
            if (!*first_error) snprintf(first_error, sizeof first_error, "status %d", c->status);
        }
        if (latency_count == latency_room) latencies = realloc(latencies, (latency_room *= 2) * sizeof *latencies);
        latencies[latency_count++] = t - c->began;
    }
    if (t > window_end || errors >= MAX_ERRORS) { hang_up(c); c->stage = OVER; return; }
    if (fresh || c->closing) { dial(c); return; }
    c->began = t + between;
    c->stage = between > 0 ? PAUSED : ASK;
}

/* The head is whole in c->bytes, `size` bytes with its blank line: note how the body ends. */
static void read_head(struct client *c, size_t size) {
    c->bytes[size - 2] = 0;
    c->status = atoi(c->bytes + 9);
    const char *length = strcasestr(c->bytes, "\r\ncontent-length:");
    c->left = length ? atol(length + 17) : 0;
    c->chunked = strcasestr(c->bytes, "\r\ntransfer-encoding: chunked") != NULL;
    c->closing = strcasestr(c->bytes, "\r\nconnection: close") != NULL;
    memset(c->tail, 0, sizeof c->tail);
}

/* Go on until something would block. */
static void step(struct client *c) {
    static char data[256 * 1024];
    int r;
    while (c->fd >= 0) switch (c->stage) {
        case CONNECTING: {
            int error = 0;
            socklen_t size = sizeof error;
            getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
            if (error) { failed(c, "connect"); return; }
            struct sockaddr_in peer;
            size = sizeof peer;
            if (getpeername(c->fd, (struct sockaddr *)&peer, &size)) return;
            if (proxy_port) c->stage = ASK_TUNNEL;
            else begin_tls(c);
            break;
        }
        case ASK_TUNNEL:
            if ((r = give(c, connect_request, connect_size)) == AGAIN) return;
            if (r == BROKEN) { failed(c, "CONNECT could not be sent"); return; }
            c->stage = AWAIT_TUNNEL;
            break;
        case AWAIT_TUNNEL:
            if ((r = take(c, c->bytes + c->head, HEAD_BYTES - c->head)) == AGAIN) return;
            if (r == BROKEN) { failed(c, "no answer to CONNECT"); return; }
            c->bytes[c->head += (size_t)r] = 0;
            if (!strstr(c->bytes, "\r\n\r\n")) break;
            if (strncmp(c->bytes + 9, "200", 3)) { c->bytes[60] = 0; failed(c, c->bytes); return; }
            c->head = 0;
            begin_tls(c);
            break;
        case HANDSHAKE:
            if ((r = SSL_do_handshake(c->tls)) == 1) {
                if (!fresh) c->began = now();
                c->stage = ASK;
                break;
            }
            if (tls_result(c, r) == AGAIN) return;
            failed(c, "TLS handshake");
            return;
        case ASK:
            if ((r = give(c, request, request_size)) == AGAIN) return;
            if (r == BROKEN) { failed(c, "the request could not be sent"); return; }
            c->head = 0;
            c->stage = AWAIT_HEAD;
            break;
        case AWAIT_HEAD: {
            if ((r = take(c, c->bytes + c->head, HEAD_BYTES - c->head)) == AGAIN) return;
            if (r == BROKEN) { failed(c, "the answer's head was cut"); return; }
            c->bytes[c->head += (size_t)r] = 0;
            char *end = memmem(c->bytes, c->head, "\r\n\r\n", 4);
            if (!end) {
                if (c->head == HEAD_BYTES) { failed(c, "the answer's head is too large"); return; }
                break;
            }
            size_t size = (size_t)(end - c->bytes) + 4, rest = c->head - size;
            read_head(c, size);
            c->stage = AWAIT_BODY;
            if (rest ? body(c, c->bytes + size, rest) : !c->left && !c->chunked) {
                answered(c);
                if (c->stage == CONNECTING) return;
            }
            break;
        }
        case AWAIT_BODY:
            if ((r = take(c, data, sizeof data)) == AGAIN) return;
            if (r == BROKEN) { failed(c, "the answer's body was cut"); return; }
            if (body(c, data, (size_t)r)) {
                answered(c);
                if (c->stage == CONNECTING) return;
            }
            break;
        case PAUSED:
            if (now() < c->began) return;
            c->began = now();
            c->stage = ASK;
            break;
        case OVER:
            return;
        }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double q) {
    return latency_count ? latencies[(size_t)(q * (double)(latency_count - 1))] * 1e3 : 0;
}

static void arguments(int count, char **words) {
    static const struct option known[] = {
        {"to", 1, 0, 't'}, {"host", 1, 0, 'h'}, {"path", 1, 0, 'p'}, {"ca", 1, 0, 'a'}, {"proxy", 1, 0, 'x'},
        {"connect-header", 1, 0, 'C'}, {"header", 1, 0, 'H'}, {"clients", 1, 0, 'c'}, {"warm", 1, 0, 'w'},
        {"seconds", 1, 0, 's'}, {"fresh", 0, 0, 'f'}, {"pause", 1, 0, 'b'}, {0}};
    for (int o; (o = getopt_long(count, words, "", known, NULL)) != -1;) switch (o) {
        case 't': to_port = atoi(optarg); break;
        case 'h': host = optarg; break;
        case 'p': path = optarg; break;
        case 'a': ca_file = optarg; break;
        case 'x': proxy_port = atoi(optarg); break;
        case 'C': connect_header = optarg; break;
        case 'H': header = optarg; break;
        case 'c': clients = atoi(optarg); break;
        case 'w': warm = atof(optarg); break;
        case 's': seconds = atof(optarg); break;
        case 'f': fresh = 1; break;
        case 'b': between = atof(optarg) / 1e3; break;
        default: exit(2);
    }
    if (!to_port || !host || !ca_file || clients < 1 || clients > MAX_CLIENTS) {
        fputs("load: --to, --host and --ca are needed; --clients is 1 to 1024\n", stderr);
        exit(2);
    }
}

int main(int count, char **words) {
    arguments(count, words);
    tls_context = SSL_CTX_new(TLS_client_method());
    if (!SSL_CTX_load_verify_locations(tls_context, ca_file, NULL)) {
        fputs("load: the CA file cannot be read\n", stderr);
        return 2;
    }
    SSL_CTX_set_verify(tls_context, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(tls_context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_session_cache_mode(tls_context, SSL_SESS_CACHE_OFF);
    static const unsigned char http1[] = "\x08http/1.1";
    SSL_CTX_set_alpn_protos(tls_context, http1, sizeof http1 - 1);
    request_size = (size_t)snprintf(request, sizeof request,
        "GET %s HTTP/1.1\r\nHost: %s:%d\r\nUser-Agent: exeat-bench\r\nAccept: */*\r\n%s%s\r\n",
        path, host, to_port, header, *header ? "\r\n" : "");
    connect_size = (size_t)snprintf(connect_request, sizeof connect_request,
        "CONNECT %s:%d HTTP/1.1\r\nHost: %s:%d\r\n%s%s\r\n",
        host, to_port, host, to_port, connect_header, *connect_header ? "\r\n" : "");
    if (request_size >= sizeof request || connect_size >= sizeof connect_request) return 2;
    latencies = malloc(latency_room * sizeof *latencies);
    struct client *all = calloc((size_t)clients, sizeof *all);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    window_start = now() + warm;
    window_end = window_start + seconds;
    for (int i = 0; i < clients; i++) {
        all[i].fd = -1;
        dial(&all[i]);
    }
    while (now() < window_end) {
        int running = 0;
        for (int i = 0; i < clients; i++) running += all[i].fd >= 0;
        if (!running) break;
        struct epoll_event events[256];
        int ready = epoll_wait(epoll_fd, events, 256, between > 0 ? 1 : 100);
        for (int i = 0; i < ready; i++) step(events[i].data.ptr);
        if (between > 0) for (int i = 0; i < clients; i++) if (all[i].stage == PAUSED) step(&all[i]);
    }
    /* With --pause the caller asks how long requests take: one that is still without an answer took at least so long. */
    if (between > 0) for (int i = 0; i < clients; i++)
        if (all[i].stage == AWAIT_HEAD || all[i].stage == AWAIT_BODY) {
            if (latency_count == latency_room) latencies = realloc(latencies, (latency_room *= 2) * sizeof *latencies);
            latencies[latency_count++] = now() - all[i].began;
        }
    qsort(latencies, latency_count, sizeof *latencies, ascending);
    for (char *p = first_error; *p; p++) if (*p < ' ' || *p == '"' || *p == '\\') *p = ' ';
    printf("{\"answers\": %ld, \"answers_ever\": %ld, \"errors\": %ld, \"seconds\": %.3f, \"bytes\": %ld, \"connections\": %ld, "
           "\"p50_ms\": %.3f, \"p99_ms\": %.3f, \"first_error\": \"%s\"}\n",
           answers, answers_ever, errors, seconds, body_bytes, connections, quantile(0.5), quantile(0.99), first_error);
    return 0;
}
