//! A compressed model whose layers round what they are given.

use std::error::Error;

use burn::module::{Module, ParamGroup};
use burn_lean::oneshot::{Activations, Compressed};
use burn_lean::quant::{
    FakeQuantizeConfig, Granularity, NumberFormat, ObserverConfig, PtqConfig, PtqMode, QatConfig,
    Scheme, WeightConfig,
};

/// The model with quantizers at the inputs of its compressed layers, a scale for each token.
///
/// The weights get quantizers, too, for the grid that they are on: symmetric, a scale for each output,
/// which gives back what it is given.
pub(crate) fn prepare<M: Module + 'static>(
    done: &Compressed<M>,
    activations: &Activations,
) -> Result<M, Box<dyn Error>> {
    let paths = done.weights.iter().map(|weight| weight.path.clone());
    let bits = done
        .weights
        .iter()
        .find_map(|weight| Some(weight.grid.as_ref()?.bits));
    let scheme = Scheme::symmetric(NumberFormat::int(activations.bits).narrow())
        .with_granularity(Granularity::PerToken);
    let inputs = FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless);
    let quantize = QatConfig::new()
        .with_weight(WeightConfig::int(bits.unwrap_or(8)))
        .with_activation(Some(inputs))
        .with_attention(false)
        .with_group(Some(ParamGroup::from_paths(paths.collect())));
    let config = PtqConfig::new()
        .with_quantize(quantize)
        .with_mode(PtqMode::Dynamic)
        .with_progress(false);
    // Ranges come from the values at hand: there is nothing to run.
    let (model, _) = config.quantize(done.model.clone(), Vec::<()>::new, |_, ()| {})?;
    Ok(model)
}
