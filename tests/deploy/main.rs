//! Models out of Burn: what is written as ONNX, judged by an engine that is not Burn's.

// The examples use more of these modules.
#[allow(dead_code)]
#[path = "../../examples/support/idx.rs"]
mod idx;
#[allow(dead_code)]
#[path = "../../examples/support/image_set.rs"]
mod image_set;
#[macro_use]
#[path = "../support/mod.rs"]
mod support;

mod batch;
mod beside_tensors;
mod blocks;
mod digits;
mod embeddings;
mod engine;
mod files_for_runtimes;
mod functions;
mod judge;
mod layers;
mod left_float;
mod loops;
mod movement;
mod narrow_integers;
mod no_code;
mod odd_shapes;
mod on_the_fly;
mod open_axes;
mod open_numbers;
mod pruned;
mod quantized;
mod refuses;
mod resident;
mod results;
mod runs;
mod small_integers;
mod threads;
mod twins;
