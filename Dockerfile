# landscape on the CPU, for clusters: docker build -t landscape . ; apptainer build landscape.sif docker-daemon://landscape:latest
# docker run --rm --user $(id -u):$(id -g) -v "$PWD:/work" landscape train digits-dpsgd -o runs/dp
FROM python:3.12-slim AS build
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir -c constraints.txt build \
    && python -m build --wheel

FROM python:3.12-slim
# PyPI's torch for Linux brings CUDA, several gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir -c /tmp/constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY --from=build /source/dist/*.whl /tmp/
RUN pip install --no-cache-dir -c /tmp/constraints.txt "$(ls /tmp/*.whl)[frames,report,pyhessian]" \
    && rm /tmp/*.whl /tmp/constraints.txt
# Writable by any user: --user, and Apptainer, which keeps the image read-only and mounts /tmp.
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib LANDSCAPE_CACHE=/tmp/landscape PYTHONUNBUFFERED=1
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["landscape"]
CMD ["--help"]
