# The image of all four processes and of the operator's command. Built from the lock; runs as no user of the host.
#   docker build -t exeat .
FROM python:3.13-slim AS build
WORKDIR /src
COPY requirements.lock pyproject.toml README.md LICENSE CHANGELOG.md ./
RUN python -m venv /opt/exeat \
 && /opt/exeat/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock
COPY rules rules
COPY wire wire
COPY net net
COPY audit audit
COPY state state
COPY broker broker
COPY proxy proxy
COPY capture capture
COPY exeat exeat
RUN /opt/exeat/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
 && /opt/exeat/bin/python -m compileall -q /opt/exeat

FROM python:3.13-slim
LABEL org.opencontainers.image.title="Exeat" \
      org.opencontainers.image.description="A credential-brokering egress proxy and access gateway for AI sandboxes" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/exeat /opt/exeat
# One user for each process (exeat/principals.py) in one group, which may open the sockets in the shared folders.
RUN groupadd --gid 10000 exeat \
 && for user in auditor:10001 vault:10002 executor:10003 worker:10004; do \
      useradd --uid "${user#*:}" --gid 10000 --no-create-home --home-dir / --shell /usr/sbin/nologin "exeat-${user%:*}"; \
    done \
 && install -d -o 10001 -g 10000 -m 0755 /run/exeat/audit \
 && install -d -o 10002 -g 10000 -m 0755 /run/exeat/control /run/exeat/admin /run/exeat/client \
 && install -d -o 10003 -g 10000 -m 0755 /run/exeat/handoff \
 && install -d -o 10002 -g 10000 -m 0700 /var/lib/exeat/vault \
 && install -d -o 10001 -g 10000 -m 0700 /var/lib/exeat/auditor /var/log/exeat
ENV PATH=/opt/exeat/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1
USER 10004:10000
ENTRYPOINT ["exeat"]
CMD ["--help"]
