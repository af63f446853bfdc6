"""From text to requests and back: tokenizer, chat templates, the engine thread, streams, and the LLM class."""
