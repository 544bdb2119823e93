"""The demo Space: a Gradio app that translates and shows attention."""
