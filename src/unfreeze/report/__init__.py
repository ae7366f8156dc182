"""L2, what a run says about itself: reads runs/<name>/ (events.jsonl, resolved_config.json, plan.json,
receipt.json). Never imports torch."""
