//! A compressed model in the inference engine.

use std::error::Error;
use std::time::Instant;

use burn::tensor::{Device, Int, Tensor};
use burn_lean::deploy::{Arithmetic, EngineConfig, Execution, Export};

use super::checkpoint::Windows;
use super::evaluate::{batches, even, likelihoods, perplexity_of};
use super::llama::Llama;

/// What the engine makes of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InEngine {
    pub(crate) perplexity: f64,
    /// Of weights and constants.
    pub(crate) bytes: usize,
}

/// Compiles the model for windows of evaluation text, and measures it there.
pub(crate) fn in_engine(
    name: &str,
    model: &Llama,
    windows: &Windows,
    size: usize,
    device: &Device,
) -> Result<InEngine, Box<dyn Error>> {
    let count = windows.count();
    let parts = batches(windows, count, even(count, size), device);
    let Some((first, _)) = parts.first() else {
        return Err("there is no window of evaluation text".into());
    };
    let forward = |model: &Llama, tokens: Tensor<2, Int>| model.forward(tokens);
    // The codes, also where floats are faster for so many tokens at once.
    let config = EngineConfig::new().with_arithmetic(Arithmetic::Integer);
    let engine = config.compile(Export::record(model, first, forward)?)?;
    let report = engine.report();
    let count = |of: &[Execution]| {
        let layers = report.layers.iter();
        layers.filter(|layer| of.contains(&layer.execution)).count()
    };
    // Its buffers are made in the first run.
    engine.run(first)?;
    let mut found = Vec::new();
    let (mut tokens, mut seconds) = (0, 0.0);
    for (inputs, targets) in parts {
        tokens += inputs.shape().num_elements();
        let start = Instant::now();
        let logits = engine.run(&inputs)?;
        seconds += start.elapsed().as_secs_f64();
        found.extend(likelihoods(logits, targets));
    }
    let in_engine = InEngine {
        perplexity: perplexity_of(&found),
        bytes: report.resident_bytes,
    };
    println!(
        "{name} in the engine ({}): perplexity {:.4}, {} bytes, {:.0} tokens/s of given text; of {} products {} of \
         codes, {} of floats and codes",
        report.backend,
        in_engine.perplexity,
        in_engine.bytes,
        tokens as f64 / seconds,
        report.layers.len(),
        count(&[Execution::Integer]),
        count(&[Execution::WeightsInteger]),
    );
    Ok(in_engine)
}
