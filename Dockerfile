# The server, with a model in it or without:
#   docker build --build-arg MODEL=mini -t t5accel:0.1.0 .          mini, mini-d1, or a hub id, which is downloaded now
#   docker run -p 8000:8000 -e T5ACCEL_API_KEY=… t5accel:0.1.0
#   docker build --build-arg MODEL= -t t5accel:0.1.0 .              then: docker run -v "$PWD/export:/model:ro" …
# `docker stop -t 40`: running requests have 30 s to finish, and Docker would wait for 10.
FROM python:3.11-slim-bookworm AS build
ARG MODEL=mini
ARG PRECISION=fp32
# PyTorch makes the export, and is not in the image that runs it. pip reads this: PyTorch's index of CPU wheels saves gigabytes.
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN mkdir /model \
    && if [ -n "$MODEL" ]; then \
        pip install --no-cache-dir -c requirements/constraints.txt "$(echo /wheels/t5accel-*.whl)[cpu]" \
        && t5accel export --model "$MODEL" --precision "$PRECISION" --out /model; \
    fi

FROM python:3.11-slim-bookworm
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,from=build,source=/source/requirements,target=/requirements \
    pip install --no-cache-dir -c /requirements/constraints.txt "$(echo /wheels/t5accel-*.whl)[runtime,serving]"
COPY --from=build /model /model
USER 10001:10001
# Flags behind the image's name win over these, and HEALTHCHECK reads the port here alone.
ENV T5ACCEL_MODEL=/model T5ACCEL_HOST=0.0.0.0 T5ACCEL_PORT=8000
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(f\"http://127.0.0.1:{os.environ['T5ACCEL_PORT']}/health/live\", timeout=2)"]
ENTRYPOINT ["t5accel", "serve"]
