//! Recurrent layers, with the quantizers of their gates.
//!
//! Burn's own forward pass asks for a weight in each time step, and so would quantize it in each.
//! Here weights are quantized once for a sequence, and so are its inputs; hidden states are
//! quantized as they come.

use burn::nn::gru::Gru;
use burn::nn::{GateController, Linear, Lstm, LstmState};
use burn::tensor::Tensor;

use crate::weight_quantizer::optional;
use crate::{FakeQuantize, ForwardQ, WeightQuantizer};

/// A linear layer whose weight is quantized already.
struct Ready<'a> {
    weight: Tensor<2>,
    bias: Option<Tensor<2>>,
    quantizers: Option<&'a WeightQuantizer>,
}

impl<'a> Ready<'a> {
    fn new(layer: &'a Linear) -> Self {
        Self {
            weight: layer.weight.val(),
            bias: layer.bias.as_ref().map(|bias| bias.val().unsqueeze()),
            quantizers: WeightQuantizer::of(&layer.weight),
        }
    }

    fn input(&self) -> Option<&'a FakeQuantize> {
        self.quantizers?.input.as_ref()
    }

    /// The product with an input that is quantized already.
    fn product(&self, x: Tensor<2>) -> Tensor<2> {
        let product = x.matmul(self.weight.clone());
        let product = match &self.bias {
            Some(bias) => product + bias.clone(),
            None => product,
        };
        match self.quantizers {
            Some(quantizers) => quantizers.quantize_output(product),
            None => product,
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.product(optional(self.input(), x))
    }
}

/// A gate over a sequence.
struct Gate<'a> {
    /// The whole sequence, quantized: `[batch, seq_length, d_input]`.
    sequence: Tensor<3>,
    input: Ready<'a>,
    hidden: Ready<'a>,
}

impl<'a> Gate<'a> {
    fn new(gate: &'a GateController, sequence: &Tensor<3>) -> Self {
        let input = Ready::new(&gate.input_transform);
        Self {
            sequence: optional(input.input(), sequence.clone()),
            input,
            hidden: Ready::new(&gate.hidden_transform),
        }
    }

    fn of_input(&self, step: usize) -> Tensor<2> {
        let x = self.sequence.clone().narrow(1, step, 1).squeeze_dim(1);
        self.input.product(x)
    }

    fn of_hidden(&self, hidden: Hidden) -> Tensor<2> {
        match hidden.is_zero {
            // Zero is on every grid, and its range would be that of the first batch.
            true => self.hidden.product(hidden.value),
            false => self.hidden.forward(hidden.value),
        }
    }

    fn sum(&self, step: usize, hidden: Hidden) -> Tensor<2> {
        self.of_input(step) + self.of_hidden(hidden)
    }
}

/// A hidden state `[batch, d_hidden]`.
#[derive(Clone)]
struct Hidden {
    value: Tensor<2>,
    /// Whether it is the state that a sequence starts from if none is given.
    is_zero: bool,
}

impl Hidden {
    fn first(given: Option<Tensor<2>>, shape: [usize; 2], like: &Tensor<3>) -> Self {
        Self {
            is_zero: given.is_none(),
            value: given.unwrap_or_else(|| Tensor::zeros(shape, &like.device())),
        }
    }

    fn next(value: Tensor<2>) -> Self {
        Self {
            value,
            is_zero: false,
        }
    }
}

fn is_prepared(gate: &GateController) -> bool {
    [&gate.input_transform, &gate.hidden_transform]
        .into_iter()
        .any(|layer| WeightQuantizer::of(&layer.weight).is_some())
}

/// Input and hidden state of a gate, both `[batch, features]`.
impl ForwardQ<(Tensor<2>, Tensor<2>)> for GateController {
    type Output = Tensor<2>;

    fn forward_q(&self, (input, hidden): (Tensor<2>, Tensor<2>)) -> Tensor<2> {
        self.input_transform.forward_q(input) + self.hidden_transform.forward_q(hidden)
    }
}

/// The sequence, and the state to start from.
impl ForwardQ<(Tensor<3>, Option<LstmState<2>>)> for Lstm {
    type Output = (Tensor<3>, LstmState<2>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<LstmState<2>>)) -> Self::Output {
        let gates = [&self.input_gate, &self.output_gate, &self.cell_gate];
        if !gates.into_iter().chain(&self.forget_gate).any(is_prepared) {
            return self.forward(sequence, state);
        }
        let sequence = match self.batch_first {
            true => sequence,
            false => sequence.swap_dims(0, 1),
        };
        let [batch, seq_length, _] = sequence.dims();
        let gate = |gate| Gate::new(gate, &sequence);
        let input_gate = gate(&self.input_gate);
        let forget_gate = self.forget_gate.as_ref().map(gate);
        let output_gate = gate(&self.output_gate);
        let cell_gate = gate(&self.cell_gate);

        let (cell, hidden) = state.map(LstmState::unpack).unzip();
        let first = |given| Hidden::first(given, [batch, self.d_hidden], &sequence);
        let (mut cell, mut hidden) = (first(cell).value, first(hidden));
        let mut outputs = vec![None; seq_length];
        for index in 0..seq_length {
            let step = match self.reverse {
                true => seq_length - 1 - index,
                false => index,
            };
            let activation = &self.gate_activation;
            let input = activation.forward(input_gate.sum(step, hidden.clone()));
            let forget = match &forget_gate {
                Some(gate) => activation.forward(gate.sum(step, hidden.clone())),
                None => input.clone().neg().add_scalar(1.0),
            };
            let output = activation.forward(output_gate.sum(step, hidden.clone()));
            let candidate = self.cell_activation.forward(cell_gate.sum(step, hidden));
            cell = forget * cell + input * candidate;
            if let Some(clip) = self.clip {
                cell = cell.clamp(-clip, clip);
            }
            hidden = Hidden::next(output * self.hidden_activation.forward(cell.clone()));
            outputs[step] = Some(hidden.value.clone().unsqueeze_dim(1));
        }
        (
            joined(outputs, self.batch_first, [batch, 0, self.d_hidden], &cell),
            LstmState::new(cell, hidden.value),
        )
    }
}

/// The sequence `[batch, seq_length, d_input]`, and the hidden state to start from.
impl ForwardQ<(Tensor<3>, Option<Tensor<2>>)> for Gru {
    type Output = Tensor<3>;

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<Tensor<2>>)) -> Tensor<3> {
        let gates = [&self.update_gate, &self.reset_gate, &self.new_gate];
        if !gates.into_iter().any(is_prepared) {
            return self.forward(sequence, state);
        }
        let [batch, seq_length, _] = sequence.dims();
        let [update_gate, reset_gate, new_gate] = gates.map(|gate| Gate::new(gate, &sequence));

        let mut hidden = Hidden::first(state, [batch, self.d_hidden], &sequence);
        let mut outputs = vec![None; seq_length];
        for (step, place) in outputs.iter_mut().enumerate() {
            let activation = &self.gate_activation;
            let update = activation.forward(update_gate.sum(step, hidden.clone()));
            let reset = activation.forward(reset_gate.sum(step, hidden.clone()));
            let candidate = match self.reset_after {
                true => new_gate.of_input(step) + reset * new_gate.of_hidden(hidden.clone()),
                false => {
                    let value = hidden.value.clone() * reset;
                    let is_zero = hidden.is_zero;
                    new_gate.sum(step, Hidden { value, is_zero })
                }
            };
            let candidate = self.hidden_activation.forward(candidate);
            let keep = update.clone().neg().add_scalar(1.0);
            let mut next = candidate * keep + update * hidden.value;
            if let Some(clip) = self.clip {
                next = next.clamp(-clip, clip);
            }
            *place = Some(next.clone().unsqueeze_dim(1));
            hidden = Hidden::next(next);
        }
        joined(outputs, true, [batch, 0, self.d_hidden], &hidden.value)
    }
}

/// The hidden states of all steps as one tensor; of `empty` shape if there are none.
fn joined(
    outputs: Vec<Option<Tensor<3>>>,
    batch_first: bool,
    empty: [usize; 3],
    like: &Tensor<2>,
) -> Tensor<3> {
    let outputs: Vec<Tensor<3>> = outputs.into_iter().flatten().collect();
    let output = match outputs.is_empty() {
        true => Tensor::zeros(empty, &like.device()),
        false => Tensor::cat(outputs, 1),
    };
    match batch_first {
        true => output,
        false => output.swap_dims(0, 1),
    }
}
