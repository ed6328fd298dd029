// HTTP/2 requests through CONNECT, the same window and the same line of JSON as load.c. Only for the HTTP/2 rows.
//   node load_h2.js PROXY TO HOST PATH CA_FILE CONNECT_HEADER CLIENTS WARM SECONDS
// CLIENTS are concurrent requests: up to 8 streams on each connection.
'use strict';
const fs = require('node:fs');
const http2 = require('node:http2');
const net = require('node:net');
const tls = require('node:tls');

const [proxy, to, host, path, caFile, connectHeader, clients, warm, seconds] = process.argv.slice(2);
const ca = fs.readFileSync(caFile);
const start = performance.now() + Number(warm) * 1000;
const end = start + Number(seconds) * 1000;
const result = { answers: 0, answers_ever: 0, errors: 0, seconds: Number(seconds), bytes: 0, connections: 0 };
const latencies = [];
let firstError = '';

function failed(error) {
  result.errors += 1;
  firstError ||= String(error && error.message ? error.message : error).replaceAll(/["\\\n]/g, ' ').slice(0, 160);
}

function ask(session) {
  const began = performance.now();
  if (began > end || session.closed || session.destroyed) return;
  const request = session.request({ ':path': path });
  let status = 0;
  request.on('response', (headers) => { status = headers[':status']; });
  request.on('data', (data) => {
    const t = performance.now();
    if (t >= start && t <= end) result.bytes += data.length;
  });
  request.on('error', failed);
  request.on('end', () => {
    const t = performance.now();
    result.answers_ever += 1;
    if (t >= start && t <= end) {
      if (status === 200) result.answers += 1;
      else failed(`status ${status}`);
      latencies.push(t - began);
    }
    if (result.errors < 1000) ask(session);
  });
}

function open(streams) {
  result.connections += 1;
  const socket = net.connect(Number(proxy), '127.0.0.1', () => {
    socket.write(`CONNECT ${host}:${to} HTTP/1.1\r\nHost: ${host}:${to}\r\n${connectHeader ? connectHeader + '\r\n' : ''}\r\n`);
  });
  socket.on('error', failed);
  socket.once('data', (answer) => {
    if (!answer.toString('latin1').startsWith('HTTP/1.1 200')) return failed(answer.toString('latin1').slice(0, 60));
    const session = http2.connect(`https://${host}:${to}`, {
      createConnection: () => tls.connect({ socket, servername: host, ALPNProtocols: ['h2'], ca }),
    });
    session.on('error', failed);
    session.once('connect', () => { for (let i = 0; i < streams; i += 1) ask(session); });
  });
}

for (let left = Number(clients); left > 0; left -= 8) open(Math.min(8, left));
setTimeout(() => {
  latencies.sort((a, b) => a - b);
  const quantile = (q) => Number((latencies[Math.floor(q * (latencies.length - 1))] || 0).toFixed(3));
  console.log(JSON.stringify({ ...result, p50_ms: quantile(0.5), p99_ms: quantile(0.99), first_error: firstError }));
  process.exit(0);
}, end - performance.now() + 5);
