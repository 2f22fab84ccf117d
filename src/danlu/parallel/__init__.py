"""Every parallel axis as a function that is applied to a model: `apply_tp`, `apply_cp`, `apply_ep`, …"""
