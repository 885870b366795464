//! Two reparameterizations on one weight.

use burn::module::{ModuleDisplay, Param, Reparameterization, Reparameterizer};
use burn::tensor::Tensor;

use crate::find::register;

mod module;

/// Applies `first` to the base and `second` to what comes out.
///
/// Either may be absent, so that one pass over a model can put an adapter on its matrices and a
/// cast on all of its parameters. Chains nest: `Chain<Mask, Chain<FakeQuantize, Autocast>>` is the
/// order mask, fake quantization, cast.
///
/// Its state is visited under the paths `weight.chain.first…` and `weight.chain.second…`, which
/// makes the order part of the record format.
#[derive(Debug, Clone)]
pub struct Chain<A, B> {
    /// Applied to the base.
    pub first: Option<A>,
    /// Applied to the output of `first`.
    pub second: Option<B>,
}

impl<A, B> Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
    /// Chains two reparameterizations, and makes the chain known to [`find`](crate::find()).
    pub fn new(first: Option<A>, second: Option<B>) -> Self {
        register::<A, B>();
        Self { first, second }
    }
}

impl<A, B> Reparameterization for Chain<A, B>
where
    A: Reparameterization + ModuleDisplay,
    B: Reparameterization + ModuleDisplay,
{
    const NAME: &'static str = "chain";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let value = match &self.first {
            Some(first) => first.apply(base),
            None => base,
        };
        match &self.second {
            Some(second) => second.apply(value),
            None => value,
        }
    }
}

/// Prepares each parameter with `first`, then with `second`, and chains what they return.
///
/// ```
/// use burn::module::{Lora, LoraAdapter, Module, ParamGroup};
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::{Chain, ChainReparameterizer, attach};
///
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// let both = ChainReparameterizer::new(Lora::new(1, 1.0), Lora::new(2, 1.0));
/// let linear = attach(linear, both).unwrap();
/// let chain = linear.weight.reparameterization::<Chain<LoraAdapter, LoraAdapter>>().unwrap();
/// assert!(chain.first.is_some() && chain.second.is_some());
/// // 4·2 + 2 of the layer, (4 + 2)·1 and (4 + 2)·2 of the adapters
/// assert_eq!(linear.num_params(), 10 + 6 + 12);
/// ```
#[derive(Debug, Clone)]
pub struct ChainReparameterizer<A, B> {
    first: A,
    second: B,
}

impl<A, B> ChainReparameterizer<A, B> {
    /// Chains two reparameterizers; `first` acts on the base.
    pub fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A, B> Reparameterizer for ChainReparameterizer<A, B>
where
    A: Reparameterizer,
    B: Reparameterizer,
    A::Reparam: ModuleDisplay,
    B::Reparam: ModuleDisplay,
{
    type Reparam = Chain<A::Reparam, B::Reparam>;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Self::Reparam>) {
        let (param, first) = self.first.reparameterize(path, param);
        let (param, second) = self.second.reparameterize(path, param);
        let chain = (first.is_some() || second.is_some()).then(|| Chain::new(first, second));
        (param, chain)
    }
}
