"""A Hugging Face Space (SDK docker or gradio's Python): the service at the port that Spaces expect."""

from graphmem.cli.main import cli

if __name__ == "__main__":
    cli(["web", "--host", "0.0.0.0", "--port", "7860", "--workers", "1", "--a-minute", "30"])
