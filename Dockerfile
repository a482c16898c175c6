# The first five minutes: docker build -t apportion . && docker run --rm --shm-size 1g apportion
# Workers share weights in /dev/shm, of which a container has 64 MB unless it is told otherwise.
FROM python:3.12-slim
WORKDIR /apportion
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install --no-cache-dir '.[report,tensorboard]' scikit-learn
RUN useradd --create-home user && chown user .
USER user
CMD ["sh", "-c", "apportion train examples/digits.py:workload && apportion check examples/digits.py:workload --strategy data_parallel --workers 2"]
