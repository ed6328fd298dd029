// An origin of Node's own http server, for tests: node [--insecure-http-parser] origin_server.cjs NAME PEM LOG PORT TLS_PORT
// Answers every request with 200 and its name; LOG gets `METHOD TARGET` a request and `! CODE` for what it cannot parse.
'use strict';
const fs = require('node:fs');
const http = require('node:http');
const https = require('node:https');

const [name, pem, log, port, tlsPort] = process.argv.slice(2);
const note = (line) => fs.appendFileSync(log, line + '\n');

const answer = (request, response) => {
  note(`${request.method} ${request.url}`);
  request.resume();
  request.on('end', () => {
    response.setHeader('X-Origin', name);
    response.end('ok');
  });
};

const key = fs.readFileSync(pem);
for (const [server, where] of [[http.createServer(answer), port], [https.createServer({key, cert: key}, answer), tlsPort]]) {
  server.keepAliveTimeout = 120000;
  server.requestTimeout = 0;
  server.on('clientError', (error, socket) => {
    // A peer that leaves in the middle of a message says nothing wrong.
    if (error.code !== 'ECONNRESET' && error.code !== 'HPE_INVALID_EOF_STATE') note(`! ${error.code}`);
    socket.destroy();
  });
  server.listen(Number(where), '127.0.0.1');
}
