'use strict';
// Loaded by NODE_OPTIONS=--require inside `exeat run`, for Node versions that do not read proxy variables themselves.
//
//   fetch         the dispatcher that Node's own undici uses, with connections made through CONNECT
//   http, https   the global agents, likewise
//
// Node reads NODE_USE_ENV_PROXY for both from 22.21 and 24.5 on; then nothing is done here. A program that brings an
// agent or dispatcher of its own keeps it. Nothing is trusted here: certificates are checked as Node checks them.

const [major, minor] = process.versions.node.split('.').map(Number);
const native = process.env.NODE_USE_ENV_PROXY === '1' &&
  (major > 24 || (major === 24 && minor >= 5) || (major === 22 && minor >= 21));
const proxy = process.env.HTTPS_PROXY || process.env.https_proxy;

if (!native && proxy) install(new URL(proxy));

function install(url) {
  const http = require('node:http');
  const https = require('node:https');
  const tls = require('node:tls');
  const direct = new Set((process.env.NO_PROXY || '').split(',').map((name) => name.trim()).filter(Boolean));
  const headers = {};
  if (url.username || url.password) {
    const pair = `${decodeURIComponent(url.username)}:${decodeURIComponent(url.password)}`;
    headers['Proxy-Authorization'] = `Basic ${Buffer.from(pair).toString('base64')}`;
  }

  // Calls back with a socket to host:port through the proxy, TLS on it where `secure` holds the options for that.
  function open(host, port, secure, done) {
    const name = host.includes(':') && !host.startsWith('[') ? `[${host}]` : host;
    const authority = `${name}:${port}`;
    const asked = http.request({
      agent: false,
      host: url.hostname,
      port: url.port || 80,
      method: 'CONNECT',
      path: authority,
      headers: { ...headers, Host: authority },
    });
    asked.once('error', done);
    asked.once('response', (answer) => {
      answer.resume();
      const refusal = new Error(`the proxy refused ${authority}: ${answer.statusCode} ${answer.statusMessage}`);
      done(Object.assign(refusal, { code: 'ECONNREFUSED', statusCode: answer.statusCode }));
    });
    asked.once('connect', (answer, socket) => {
      if (answer.statusCode !== 200) {
        socket.destroy();
        const refusal = new Error(`the proxy refused ${authority}: ${answer.statusCode} ${answer.statusMessage}`);
        done(Object.assign(refusal, { code: 'ECONNREFUSED', statusCode: answer.statusCode }));
      } else if (secure) {
        const wrapped = tls.connect({ ...secure, socket });
        wrapped.once('error', done);
        wrapped.once('secureConnect', () => {
          wrapped.removeListener('error', done);
          done(null, wrapped);
        });
      } else {
        done(null, socket);
      }
    });
    asked.end();
  }

  function once(done) {
    let told = false;
    return (error, socket) => {
      if (told) return;
      told = true;
      if (error) done(error); else done(null, socket);
    };
  }

  for (const [module, port] of [[http, 80], [https, 443]]) {
    const original = module.globalAgent.createConnection;
    module.globalAgent.createConnection = function createConnection(options, done) {
      if (options.socketPath || direct.has(options.host)) return original.call(this, options, done);
      const secure = module === https ? { servername: options.host, ...options } : null;
      open(options.host, options.port || port, secure, once(done));
      return undefined;
    };
  }

  const key = Symbol.for('undici.globalDispatcher.1');
  const fetch = globalThis.fetch;
  if (typeof fetch !== 'function') return;
  let prepared = false;

  function prepare() {
    prepared = true;
    void globalThis.Headers; // loads Node's undici, which sets its dispatcher
    const Agent = globalThis[key] && globalThis[key].constructor;
    if (!Agent) return;
    const plain = new Agent();
    const through = new Agent({
      connect(options, done) {
        const port = options.port || (options.protocol === 'https:' ? 443 : 80);
        const secure = options.protocol === 'https:'
          ? { servername: options.servername || options.hostname, ALPNProtocols: ['http/1.1'] }
          : null;
        open(options.hostname, port, secure, once(done));
      },
    });
    const dispatch = through.dispatch.bind(through);
    through.dispatch = (options, handler) =>
      direct.has(new URL(options.origin).hostname) ? plain.dispatch(options, handler) : dispatch(options, handler);
    globalThis[key] = through;
  }

  globalThis.fetch = function (input, init) {
    if (!prepared) prepare();
    return fetch(input, init);
  };
}
