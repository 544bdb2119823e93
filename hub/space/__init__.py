"""Web pages that translate and show attention: a Gradio app and a static page."""
