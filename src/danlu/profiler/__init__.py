"""Steps of real ranks under torch's profiler: where their time goes, by the parts that `danlu plan` predicts."""
