//! A forward pass of a [Burn](https://burn.dev) model as a graph of operations, and its execution,
//! with gradients, on any device.

#[cfg_attr(not(test), expect(dead_code))]
mod interpret;

pub use interpret::name;
