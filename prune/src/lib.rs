//! Pruning for Burn.
