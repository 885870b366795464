//! Quantizers that are attached to the weights of a model.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleDisplay, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;
use burn_lean_reparam::{AttachError, Chain, Rejected, attach_over, attached, settle};

use crate::model::column_layout;
use crate::module::sites::SiteQuantizers;
use crate::module::walk::{Site, quantizers};
use crate::{FakeQuantize, WeightQuantizer};

/// Attaches the quantizers that a [`QatConfig`](crate::QatConfig) made for a model, or that a file names.
#[derive(Debug)]
pub struct AttachQuantizers {
    pub(crate) quantizers: HashMap<String, WeightQuantizer>,
}

impl Reparameterizer for AttachQuantizers {
    type Reparam = WeightQuantizer;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<WeightQuantizer>) {
        let Some(mut quantizer) = self.quantizers.remove(path) else {
            return (param, None);
        };
        let dtype = param.base().dtype();
        if dtype.is_float() {
            quantizer.weight = quantizer.weight.with_dtype(dtype.into());
        }
        let param = column_layout::quantizable(param, quantizer.weight.scheme());
        (param, Some(quantizer))
    }
}

/// Attaches a reparameterization behind the quantizers that weights carry, as a
/// [`Chain`] of both: adapters on weights that were quantized before, whose codes they leave as they are
/// ([QLoRA, Dettmers et al., 2023](https://arxiv.org/abs/2305.14314)).
///
/// A parameter that `reparameterizer` chooses and that carries no quantizers gets a chain of this one alone.
///
/// ```
/// use burn::module::{Lora, LoraAdapter, Module};
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_lean_quant::{QatConfig, WeightConfig, WeightQuantizer, qat::attach_behind};
/// use burn_lean_reparam::Chain;
///
/// let quantized = QatConfig::new().with_weight(WeightConfig::int(4));
/// let linear = quantized.prepare(LinearConfig::new(8, 4).init(&Device::flex()))?;
/// let adapted = attach_behind(linear.no_grad(), Lora::new(2, 4.0))?;
/// let chain = adapted.weight.reparameterization::<Chain<WeightQuantizer, LoraAdapter>>().unwrap();
/// assert!(chain.first.is_some() && chain.second.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Those of [`attach`](burn_lean_reparam::attach), where a parameter carries something else, a mask for instance.
pub fn attach_behind<M, R>(model: M, reparameterizer: R) -> Result<M, Rejected<M, AttachError>>
where
    M: Module,
    R: Reparameterizer<Reparam: ModuleDisplay>,
{
    settle(&model);
    let carried = attached(&model).into_iter();
    let carried = carried.filter(|one| one.name == WeightQuantizer::NAME);
    let carried: HashSet<String> = carried.map(|one| one.path).collect();
    let mut parts: HashMap<String, Vec<(Site, FakeQuantize)>> = HashMap::new();
    for located in quantizers(&model) {
        if let Some(path) = located.parameter.filter(|path| carried.contains(path)) {
            let of_path = parts.entry(path).or_default();
            of_path.push((located.site, located.quantizer));
        }
    }
    let quantizers = parts
        .into_iter()
        .filter_map(|(path, parts)| Some((path, joined(parts)?)))
        .collect();
    let behind = Behind {
        first: AttachQuantizers { quantizers },
        second: reparameterizer,
    };
    attach_over(model, behind, |path| carried.contains(path))
}

struct Behind<R> {
    first: AttachQuantizers,
    second: R,
}

impl<R: Reparameterizer<Reparam: ModuleDisplay>> Reparameterizer for Behind<R> {
    type Reparam = Chain<WeightQuantizer, R::Reparam>;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Self::Reparam>) {
        let (param, second) = self.second.reparameterize(path, param);
        if second.is_none() {
            return (param, None);
        }
        let (param, first) = self.first.reparameterize(path, param);
        (param, Some(Chain::new(first, second)))
    }
}

/// The quantizers of a layer in one; `None` without one of the weight.
fn joined(parts: Vec<(Site, FakeQuantize)>) -> Option<WeightQuantizer> {
    let (mut weight, mut input, mut output, mut attention) = (None, None, None, None);
    let mut sites = SiteQuantizers::default();
    for (site, quantizer) in parts {
        match site {
            Site::Weight => weight = Some(quantizer),
            Site::Input => input = Some(quantizer),
            Site::Output => output = Some(quantizer),
            Site::Attention => attention = Some(quantizer),
            Site::Operation | Site::Standalone => sites.push(quantizer),
        }
    }
    Some(WeightQuantizer {
        weight: weight?,
        input,
        output,
        attention,
        sites,
    })
}
