"""What a run says about itself, read from runs/<name>/ without torch.

Of events.jsonl, resolved_config.json, plan.json and receipt.json. Layer 2.
"""
