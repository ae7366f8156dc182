"""An OpenAI-style endpoint on this machine: chat completions by the engine, in batches."""
