//! Who is shown what passes through the quantizers of a model, and the inputs of its layers.

pub(crate) mod input_statistics;
pub(crate) mod layer_inputs;
pub(crate) mod listener;
pub(crate) mod shown_inputs;
pub(crate) mod tap;
pub(crate) mod watch;
