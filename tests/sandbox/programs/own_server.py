"""Starts a small metrics server of its own on the loopback and asks it."""
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
from torch import nn


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"steps 3")

    def log_message(self, *args):
        pass


server = HTTPServer(("127.0.0.1", 0), Metrics)
threading.Thread(target=server.serve_forever, daemon=True).start()
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("SEE", urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").read())
server.shutdown()
