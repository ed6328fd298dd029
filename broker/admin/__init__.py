"""The admin API: JSON over HTTP on a Unix socket. server.py serves it in the vault; client.py is for commands.

Every answer is a JSON object. A refusal or fault is {"error": code, "detail": sentence, "remedy": sentence}.
Times are Unix seconds; no answer holds a secret; a token and placeholders appear once, in the answer to a create.

 GET    /v1/status                 processes, policy (active digest, rejection), sandboxes, store generation
 POST   /v1/sandboxes              {role, ttl?, owner?, agent?, task?, attributes?, channel?, tenant?}
                                   201 {id, tenant, epoch, role, owner, agent, task, attributes, created_at,
                                   expires_at, token, channel, channel_key, env, credentials, proxy_url,
                                   unacknowledged}
                                   ttl: seconds or "90s", "15m", "1h"; channel: {"kind": "shared"} (default) or
                                   {"kind": "address", "address": "10.0.0.2"} or {"kind": "port"|"unix"|"namespace"}
                                   (these three identify alone and get a channel_key, hex, for their listener)
                                   boundary: null, "external" (the role says so), "namespaces" or "probed" (seen by
                                   our own process) or "broken" (a probe got out);
                                   armed: whether credentials are used for it;
                                   claimed: null, or {at, holds, fails, unknown}: what a doctor inside said last
 GET    /v1/sandboxes[?all=1]      {sandboxes: [...]}                 GET /v1/sandboxes/{id}
 DELETE /v1/sandboxes/{id}         {id, ended_at, deleted: [...], remains: [...], unacknowledged: [...]}
 POST   /v1/sandboxes/{id}/boundary  {proven: "namespaces" | "probed"} {id, boundary}; said by what started the probe
                                   {broken: [way, ...]} {id, boundary, unacknowledged}; a probe got out
 POST   /v1/sandboxes/{id}/drops  {counts: {class: packets}, interface?, error?} {id, count}; said by who reads counters
 GET    /v1/policy                 {digest, loaded_at, files, roles, warnings, rejected, document}
 POST   /v1/policy/reload          {digest, changed, warnings, unacknowledged} or 422 {..., problems: [...]}
 POST   /v1/policy/decide          {sandbox | role, method, url, headers?}
                                   {decision: deny | hold | needs-body | permit, reason?, rule?, ...}
 GET    /v1/secrets                {generation, secrets: [{name, owner, version, created_at, scrub}]}
 POST   /v1/secrets                {name, owner, value | value_base64, scrub?} 201 {name, version, generation}
 PUT    /v1/secrets/{name}         {value | value_base64, scrub?}  rotate   DELETE /v1/secrets/{name}
 POST   /v1/credentials/check      {credential?, sandbox?} {references: [{credential, part, source, version,
                                   fingerprint, age, needs_sandbox, error, detail, remedy}]}; asked past every cache
 POST   /v1/credentials/sync       the same, and what comes is what uses get from now on
 POST   /v1/store/rotate-key       {value? | value_base64?} {records, generation}; no value: a key file gets a new key
 POST   /v1/store/backup           {} the bytes of a backup (application/octet-stream)
 POST   /v1/store/marks            {} {key, marks: [{name, form, lead, length, digest}], missing: [...]}; wire/marks.py
 GET    /v1/ca                     {root_pem, fingerprint_sha256}
 POST   /v1/clock/reset            {why} take the machine's clock as right though it is behind the floor
"""
