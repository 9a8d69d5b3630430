# The service of `graphmem web`, with what it needs for PyTorch, Hugging Face and timm models; no GPU.
FROM python:3.11-slim
RUN useradd --create-home graphmem
COPY . /source
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "/source[web,hf,timm,ort]" && rm -r /source
USER graphmem
EXPOSE 8642
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8642/healthz')"]
CMD ["graphmem", "web", "--host", "0.0.0.0", "--port", "8642"]
