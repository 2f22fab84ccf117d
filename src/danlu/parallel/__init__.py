"""A function for every parallel axis, applied to a model: `apply_tp`, `apply_cp`, `apply_ep`, …"""
