//! Quantization for Burn.
