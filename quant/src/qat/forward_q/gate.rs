//! A gate of a recurrent layer over a sequence.
//!
//! Burn's own forward pass asks for a weight in each time step, and so would quantize it in each.
//! Here weights are quantized once for a sequence, and so are its inputs, unless each step has a
//! range of its own; hidden states are quantized as they come.
//!
//! Where kernels multiply by the codes of weights, the inputs of all steps are in one product, and what
//! several gates multiply is read once, and rounded once where they round alike.

use std::cell::OnceCell;

use burn::nn::{GateController, Linear};
use burn::tensor::Tensor;

use super::input_of;
use crate::WeightQuantizer;
#[cfg(feature = "kernels")]
use crate::codes::kernel::steps::{Products, Shared, Steps};
use crate::module::listen::layer_inputs;

/// A linear layer whose weight is quantized already.
struct Ready<'a> {
    layer: &'a Linear,
    quantizers: Option<&'a WeightQuantizer>,
    /// Weight and bias; where a kernel has the codes, not before something is multiplied by them.
    values: OnceCell<(Tensor<2>, Option<Tensor<2>>)>,
    #[cfg(feature = "kernels")]
    codes: Option<Steps<'a>>,
}

impl Ready<'_> {
    fn values(&self) -> &(Tensor<2>, Option<Tensor<2>>) {
        self.values.get_or_init(|| {
            let bias = self.layer.bias.as_ref();
            let weight = self.layer.weight.val();
            (weight, bias.map(|bias| bias.val().unsqueeze()))
        })
    }

    fn quantize_input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.quantizers {
            Some(quantizers) => quantizers.quantize_input(input_of(&self.layer.weight, x)),
            None => x,
        }
    }

    fn quantize_output(&self, product: Tensor<2>) -> Tensor<2> {
        match self.quantizers {
            Some(quantizers) => quantizers.quantize_output(product),
            None => product,
        }
    }

    fn takes_steps(&self) -> bool {
        let input = self.quantizers.and_then(|of| of.input.as_ref());
        input.is_some_and(|input| input.is_enabled() && input.takes_steps())
    }

    /// The product with an input that is quantized already.
    fn product(&self, x: Tensor<2>) -> Tensor<2> {
        layer_inputs::linear(&self.layer.weight, &x);
        let (weight, bias) = self.values();
        let product = x.matmul(weight.clone());
        self.quantize_output(match bias {
            Some(bias) => product + bias.clone(),
            None => product,
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        #[cfg(feature = "kernels")]
        if let Some(codes) = &self.codes
            && let Some(product) = codes.product(&Shared::new(x.clone()))
        {
            return self.quantize_output(codes.tensor(product));
        }
        self.product(self.quantize_input(x))
    }
}

/// A sequence `[batch, seq_length, d_input]`, which the gates of a layer share.
pub(super) struct Sequence {
    value: Tensor<3>,
    #[cfg(feature = "kernels")]
    shared: Shared<3>,
}

impl Sequence {
    pub(super) fn new(value: &Tensor<3>) -> Self {
        Self {
            value: value.clone(),
            #[cfg(feature = "kernels")]
            shared: Shared::new(value.clone()),
        }
    }

    fn ready<'a>(&self, layer: &'a Linear) -> Ready<'a> {
        let ready = Ready {
            layer,
            quantizers: WeightQuantizer::of(&layer.weight),
            values: OnceCell::new(),
            #[cfg(feature = "kernels")]
            codes: Steps::new(layer, &self.shared),
        };
        #[cfg(feature = "kernels")]
        if ready.codes.is_some() {
            return ready;
        }
        ready.values();
        ready
    }
}

/// What a gate takes from a sequence.
enum Inputs {
    /// Its numbers, each step of which is quantized by itself.
    Given(Tensor<3>),
    Quantized(Tensor<3>),
    #[cfg(feature = "kernels")]
    Multiplied(Products),
}

/// A gate over a sequence.
pub(super) struct Gate<'a> {
    inputs: Inputs,
    input: Ready<'a>,
    hidden: Ready<'a>,
}

impl<'a> Gate<'a> {
    pub(super) fn new(gate: &'a GateController, sequence: &Sequence) -> Self {
        let input = sequence.ready(&gate.input_transform);
        Self {
            inputs: inputs(&input, sequence),
            input,
            hidden: sequence.ready(&gate.hidden_transform),
        }
    }

    pub(super) fn of_input(&self, step: usize) -> Tensor<2> {
        let of_step = |x: &Tensor<3>| x.clone().narrow(1, step, 1).squeeze_dim(1);
        match &self.inputs {
            Inputs::Given(x) => self.input.forward(of_step(x)),
            Inputs::Quantized(x) => self.input.product(of_step(x)),
            #[cfg(feature = "kernels")]
            Inputs::Multiplied(products) => self.input.quantize_output(products.of_step(step)),
        }
    }

    pub(super) fn of_hidden(&self, hidden: &Hidden) -> Tensor<2> {
        #[cfg(feature = "kernels")]
        if let Some(product) = self.hidden_of_codes(hidden) {
            return self.hidden.quantize_output(product);
        }
        let value = hidden.value.clone();
        match hidden.is_zero {
            // Zero is on every grid, and its range would be that of the first batch.
            true => self.hidden.product(value),
            false => self.hidden.product(self.hidden.quantize_input(value)),
        }
    }

    pub(super) fn sum(&self, step: usize, hidden: &Hidden) -> Tensor<2> {
        #[cfg(feature = "kernels")]
        if let Some(sum) = self.sum_of_codes(step, hidden) {
            return sum;
        }
        self.of_input(step) + self.of_hidden(hidden)
    }
}

fn inputs(input: &Ready<'_>, sequence: &Sequence) -> Inputs {
    #[cfg(feature = "kernels")]
    if let Some(codes) = &input.codes
        && let Some(products) = codes.products(&sequence.shared)
    {
        return Inputs::Multiplied(products);
    }
    let value = sequence.value.clone();
    match input.takes_steps() {
        true => Inputs::Given(value),
        false => Inputs::Quantized(input.quantize_input(value)),
    }
}

#[cfg(feature = "kernels")]
impl Gate<'_> {
    /// Before it is quantized.
    fn hidden_of_codes(&self, hidden: &Hidden) -> Option<Tensor<2>> {
        let codes = self.hidden.codes.as_ref()?;
        Some(codes.tensor(hidden.product(codes)?))
    }

    /// Where both products are of codes, and are added up as they are.
    fn sum_of_codes(&self, step: usize, hidden: &Hidden) -> Option<Tensor<2>> {
        let Inputs::Multiplied(products) = &self.inputs else {
            return None;
        };
        let codes = self.hidden.codes.as_ref()?;
        let rounds = |ready: &Ready<'_>| ready.quantizers.is_some_and(|of| of.output.is_some());
        if rounds(&self.input) || rounds(&self.hidden) {
            return None;
        }
        // A state of one example is that of all.
        if [hidden.value.dims()[0], codes.outputs()] != products.shape() {
            return None;
        }
        let mut sum = hidden.product(codes)?;
        products.add_to(step, &mut sum);
        Some(codes.tensor(sum))
    }
}

/// A hidden state `[batch, d_hidden]`, which the gates of a layer share.
pub(super) struct Hidden {
    pub(super) value: Tensor<2>,
    /// Whether it is the state that a sequence starts from if none is given.
    is_zero: bool,
    #[cfg(feature = "kernels")]
    shared: Shared<2>,
}

impl Hidden {
    pub(super) fn first(given: Option<Tensor<2>>, shape: [usize; 2], like: &Tensor<3>) -> Self {
        let is_zero = given.is_none();
        let zeros = || Tensor::zeros(shape, (&like.device(), like.dtype()));
        Self::new(given.unwrap_or_else(zeros), is_zero)
    }

    pub(super) fn next(value: Tensor<2>) -> Self {
        Self::new(value, false)
    }

    fn new(value: Tensor<2>, is_zero: bool) -> Self {
        Self {
            #[cfg(feature = "kernels")]
            shared: Shared::new(value.clone()),
            value,
            is_zero,
        }
    }

    /// What a reset gate leaves of it.
    pub(super) fn reset(&self, by: Tensor<2>) -> Self {
        Self::new(self.value.clone() * by, self.is_zero)
    }

    #[cfg(feature = "kernels")]
    fn product(&self, codes: &Steps<'_>) -> Option<Vec<f32>> {
        match self.is_zero {
            true => codes.product_of_zeros(&self.shared),
            false => codes.product(&self.shared),
        }
    }
}

#[cfg(all(test, feature = "kernels", feature = "flex"))]
mod tests;
