# The locked environment in an image, so that a machine trains seconds after it is there. Optional: without it every node
# makes the environment itself. THE WHOLE IMAGE WAS NEVER BUILT OR RUN YET.
#
#   docker build -t REGISTRY/spotrl:TAG . && docker push REGISTRY/spotrl:TAG       then --set cluster.image=REGISTRY/spotrl:TAG
#
# `trainer/shell/setup.sh` takes it where its requirements and the checkout's are the same, byte for byte.
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
RUN apt-get update && apt-get install -y --no-install-recommends openssh-server rsync curl \
    libibverbs1 ibverbs-providers librdmacm1 && rm -rf /var/lib/apt/lists/*
ENV UV_PYTHON_INSTALL_DIR=/opt/spotrl/python
WORKDIR /opt/spotrl
COPY requirements/gpu.txt requirements/gpu.txt
COPY trainer/shell/setup.sh trainer/shell/setup.sh
COPY trainer/shell/installed.py trainer/shell/installed.py
RUN UV_NO_CACHE=1 SPOTRL_IMAGE_DIR=/nowhere bash trainer/shell/setup.sh gpu
WORKDIR /root
