# An image with lossycoll and its command line: `docker build -t lossycoll .`, then
# `docker run --rm --network host --shm-size 1g lossycoll doctor`. docs/release.md says more.
FROM python:3.12-bookworm AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
# torch's CPU build is smaller: --build-arg INDEX=... names an index that has it.
ARG INDEX=
COPY --from=build /wheels /wheels
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ${INDEX:+--index-url "$INDEX"} /wheels/*.whl \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["lossycoll"]
CMD ["doctor"]
