# syntax=docker/dockerfile:1
#
# Turnwire in a distroless image: no shell, no package manager, uid 65532, nothing written to disk.
#
#   docker build -t turnwire --build-arg REVISION="$(git rev-parse HEAD)" .
#   docker run --rm --read-only --cap-drop ALL -p 127.0.0.1:8787:8787 turnwire
#
# Everything that is installed is pinned by hash (requirements.lock, requirements-build.lock). The two
# base images are pinned by tag, so that a rebuild takes their security updates; for a build that
# can be repeated, give them with digests: --build-arg RUNTIME_IMAGE=...@sha256:...
#
# Both must be of one Debian and one minor version of Python: what the first one compiles, the
# second one runs.

ARG BUILD_IMAGE=python:3.13-slim-trixie
ARG RUNTIME_IMAGE=gcr.io/distroless/python3-debian13:nonroot

FROM ${BUILD_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements.lock requirements-build.lock ./
RUN pip install --require-hashes --only-binary=:all: --prefix=/out -r requirements.lock \
    && pip install --require-hashes --only-binary=:all: -r requirements-build.lock
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
# Compiled here, since the root is read-only there: to be trusted without a look at the sources' times.
RUN pip install --no-deps --no-build-isolation --prefix=/out . \
    && sed -i '1s|.*|#!/usr/bin/python3.13|' /out/bin/turnwire \
    && python -m compileall -q --invalidation-mode unchecked-hash \
        -s /out/lib/python3.13/site-packages -p /usr/local/lib/python3.13/dist-packages \
        /out/lib/python3.13/site-packages

FROM ${RUNTIME_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="Turnwire" \
      org.opencontainers.image.description="Gives stateless Responses API agents the latency of WebSocket mode" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="gcr.io/distroless/python3-debian13:nonroot"
COPY --from=build /out/lib/python3.13/site-packages /usr/local/lib/python3.13/dist-packages
COPY --from=build /out/bin/turnwire /usr/local/bin/turnwire
# In a container, loopback is the container's own: publish the ports to whom you choose.
ENV TURNWIRE_HOST=0.0.0.0 TURNWIRE_ADMIN_HOST=0.0.0.0 TURNWIRE_LOG_FORMAT=json \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
USER 65532:65532
EXPOSE 8787 8788
HEALTHCHECK --interval=30s --timeout=10s --start-period=10s CMD ["/usr/local/bin/turnwire", "health"]
ENTRYPOINT ["/usr/local/bin/turnwire"]
CMD ["serve"]
