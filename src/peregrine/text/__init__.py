"""Text in and out of token ids: tokenizer files, chat templates, and text that is final as tokens arrive."""
