//! Recurrent layers, with the quantizers of their gates.
//!
//! Burn's own forward pass asks for a weight in each time step, and so would quantize it in each.
//! Here weights are quantized once for a sequence, and so are its inputs, unless each step has a
//! range of its own; hidden states are quantized as they come.

use burn::nn::gru::Gru;
use burn::nn::{GateController, Linear, Lstm, LstmState, Rnn, RnnState};
use burn::tensor::Tensor;
use burn_lean_graph::hooks::ForwardPass;

use super::input_of;
use crate::module::listen::layer_inputs;
use crate::{FakeQuantize, ForwardQ, WeightQuantizer};

/// A linear layer whose weight is quantized already.
struct Ready<'a> {
    layer: &'a Linear,
    weight: Tensor<2>,
    bias: Option<Tensor<2>>,
    quantizers: Option<&'a WeightQuantizer>,
}

impl<'a> Ready<'a> {
    fn new(layer: &'a Linear) -> Self {
        Self {
            layer,
            weight: layer.weight.val(),
            bias: layer.bias.as_ref().map(|bias| bias.val().unsqueeze()),
            quantizers: WeightQuantizer::of(&layer.weight),
        }
    }

    fn quantize_input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self.quantizers {
            Some(quantizers) => quantizers.quantize_input(input_of(&self.layer.weight, x)),
            None => x,
        }
    }

    fn takes_steps(&self) -> bool {
        let input = self.quantizers.and_then(|of| of.input.as_ref());
        input.is_some_and(FakeQuantize::takes_steps)
    }

    /// The product with an input that is quantized already.
    fn product(&self, x: Tensor<2>) -> Tensor<2> {
        layer_inputs::linear(&self.layer.weight, &x);
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
        self.product(self.quantize_input(x))
    }
}

/// A gate over a sequence.
struct Gate<'a> {
    /// The whole sequence: `[batch, seq_length, d_input]`.
    sequence: Tensor<3>,
    /// Whether that is quantized already.
    is_quantized: bool,
    input: Ready<'a>,
    hidden: Ready<'a>,
}

impl<'a> Gate<'a> {
    fn new(gate: &'a GateController, sequence: &Tensor<3>) -> Self {
        let input = Ready::new(&gate.input_transform);
        let is_quantized = !input.takes_steps();
        let sequence = sequence.clone();
        Self {
            sequence: match is_quantized {
                true => input.quantize_input(sequence),
                false => sequence,
            },
            is_quantized,
            input,
            hidden: Ready::new(&gate.hidden_transform),
        }
    }

    fn of_input(&self, step: usize) -> Tensor<2> {
        let x = self.sequence.clone().narrow(1, step, 1).squeeze_dim(1);
        match self.is_quantized {
            true => self.input.product(x),
            false => self.input.forward(x),
        }
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
            value: given.unwrap_or_else(|| Tensor::zeros(shape, (&like.device(), like.dtype()))),
        }
    }

    fn next(value: Tensor<2>) -> Self {
        Self {
            value,
            is_zero: false,
        }
    }
}

pub(super) fn is_prepared(gate: &GateController) -> bool {
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
impl ForwardQ<(Tensor<3>, Option<RnnState<2>>)> for Rnn {
    type Output = (Tensor<3>, RnnState<2>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<RnnState<2>>)) -> Self::Output {
        if !is_prepared(&self.gate) {
            return self.forward(sequence, state);
        }
        let sequence = batch_first(sequence, self.batch_first);
        let (output, state) = rnn(self, sequence, state, self.reverse);
        (batch_first(output, self.batch_first), state)
    }
}

/// The sequence, and the state to start from.
impl ForwardQ<(Tensor<3>, Option<LstmState<2>>)> for Lstm {
    type Output = (Tensor<3>, LstmState<2>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<LstmState<2>>)) -> Self::Output {
        if !is_lstm_prepared(self) {
            return self.forward(sequence, state);
        }
        let sequence = batch_first(sequence, self.batch_first);
        let (output, state) = lstm(self, sequence, state, self.reverse);
        (batch_first(output, self.batch_first), state)
    }
}

/// The sequence `[batch, seq_length, d_input]`, and the hidden state to start from.
impl ForwardQ<(Tensor<3>, Option<Tensor<2>>)> for Gru {
    type Output = Tensor<3>;

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<Tensor<2>>)) -> Tensor<3> {
        match is_gru_prepared(self) {
            true => gru(self, sequence, state, false).0,
            false => self.forward(sequence, state),
        }
    }
}

pub(super) fn is_lstm_prepared(lstm: &Lstm) -> bool {
    let gates = [&lstm.input_gate, &lstm.output_gate, &lstm.cell_gate];
    gates.into_iter().chain(&lstm.forget_gate).any(is_prepared)
}

pub(super) fn is_gru_prepared(gru: &Gru) -> bool {
    let gates = [&gru.update_gate, &gru.reset_gate, &gru.new_gate];
    gates.into_iter().any(is_prepared)
}

/// Between `[batch, seq_length, ..]` and the layer's own order of axes.
pub(super) fn batch_first(sequence: Tensor<3>, batch_first: bool) -> Tensor<3> {
    match batch_first {
        true => sequence,
        false => sequence.swap_dims(0, 1),
    }
}

/// The hidden states `[batch, seq_length, d_hidden]` of a layer over a sequence
/// `[batch, seq_length, d_input]`, in its order or from its end, and the last of them.
pub(super) fn rnn(
    layer: &Rnn,
    sequence: Tensor<3>,
    state: Option<RnnState<2>>,
    reverse: bool,
) -> (Tensor<3>, RnnState<2>) {
    let _steps = ForwardPass::begin();
    let shape = [sequence.dims()[0], layer.d_hidden];
    let gate = Gate::new(&layer.gate, &sequence);
    let mut hidden = Hidden::first(state.map(|state| state.hidden), shape, &sequence);
    let mut outputs = Outputs::new(&sequence);
    for step in outputs.steps(reverse) {
        let mut next = layer.hidden_activation.forward(gate.sum(step, hidden));
        if let Some(clip) = layer.clip {
            next = next.clamp(-clip, clip);
        }
        hidden = outputs.put(step, next);
    }
    (outputs.joined(&hidden), RnnState::new(hidden.value))
}

/// As [`rnn`].
pub(super) fn lstm(
    layer: &Lstm,
    sequence: Tensor<3>,
    state: Option<LstmState<2>>,
    reverse: bool,
) -> (Tensor<3>, LstmState<2>) {
    let _steps = ForwardPass::begin();
    let shape = [sequence.dims()[0], layer.d_hidden];
    let gate = |gate| Gate::new(gate, &sequence);
    let input_gate = gate(&layer.input_gate);
    let forget_gate = layer.forget_gate.as_ref().map(gate);
    let output_gate = gate(&layer.output_gate);
    let cell_gate = gate(&layer.cell_gate);

    let (cell, hidden) = state.map(LstmState::unpack).unzip();
    let first = |given| Hidden::first(given, shape, &sequence);
    let (mut cell, mut hidden) = (first(cell).value, first(hidden));
    let mut outputs = Outputs::new(&sequence);
    for step in outputs.steps(reverse) {
        let activation = &layer.gate_activation;
        let input = activation.forward(input_gate.sum(step, hidden.clone()));
        let forget = match &forget_gate {
            Some(gate) => activation.forward(gate.sum(step, hidden.clone())),
            None => input.clone().neg().add_scalar(1.0),
        };
        let output = activation.forward(output_gate.sum(step, hidden.clone()));
        let candidate = layer.cell_activation.forward(cell_gate.sum(step, hidden));
        cell = forget * cell + input * candidate;
        if let Some(clip) = layer.clip {
            cell = cell.clamp(-clip, clip);
        }
        let next = output * layer.hidden_activation.forward(cell.clone());
        hidden = outputs.put(step, next);
    }
    (outputs.joined(&hidden), LstmState::new(cell, hidden.value))
}

/// As [`rnn`].
pub(super) fn gru(
    layer: &Gru,
    sequence: Tensor<3>,
    state: Option<Tensor<2>>,
    reverse: bool,
) -> (Tensor<3>, Tensor<2>) {
    let _steps = ForwardPass::begin();
    let shape = [sequence.dims()[0], layer.d_hidden];
    let gates = [&layer.update_gate, &layer.reset_gate, &layer.new_gate];
    let [update_gate, reset_gate, new_gate] = gates.map(|gate| Gate::new(gate, &sequence));

    let mut hidden = Hidden::first(state, shape, &sequence);
    let mut outputs = Outputs::new(&sequence);
    for step in outputs.steps(reverse) {
        let activation = &layer.gate_activation;
        let update = activation.forward(update_gate.sum(step, hidden.clone()));
        let reset = activation.forward(reset_gate.sum(step, hidden.clone()));
        let candidate = match layer.reset_after {
            true => new_gate.of_input(step) + reset * new_gate.of_hidden(hidden.clone()),
            false => {
                let value = hidden.value.clone() * reset;
                let is_zero = hidden.is_zero;
                new_gate.sum(step, Hidden { value, is_zero })
            }
        };
        let candidate = layer.hidden_activation.forward(candidate);
        let keep = update.clone().neg().add_scalar(1.0);
        let mut next = candidate * keep + update * hidden.value;
        if let Some(clip) = layer.clip {
            next = next.clamp(-clip, clip);
        }
        hidden = outputs.put(step, next);
    }
    (outputs.joined(&hidden), hidden.value)
}

/// The hidden states of all steps, in the order of the sequence.
struct Outputs(Vec<Option<Tensor<3>>>);

impl Outputs {
    fn new(sequence: &Tensor<3>) -> Self {
        Self(vec![None; sequence.dims()[1]])
    }

    /// The steps, in the order in which the layer takes them.
    fn steps(&self, reverse: bool) -> Vec<usize> {
        let steps = 0..self.0.len();
        match reverse {
            true => steps.rev().collect(),
            false => steps.collect(),
        }
    }

    /// Puts the state after a step in its place, and gives it to the next step.
    fn put(&mut self, step: usize, next: Tensor<2>) -> Hidden {
        self.0[step] = Some(next.clone().unsqueeze_dim(1));
        Hidden::next(next)
    }

    /// As one tensor; with no step in it if there are none.
    fn joined(self, last: &Hidden) -> Tensor<3> {
        let outputs: Vec<Tensor<3>> = self.0.into_iter().flatten().collect();
        let [batch, d_hidden] = last.value.dims();
        match outputs.is_empty() {
            true => Tensor::zeros([batch, 0, d_hidden], &last.value.device()),
            false => Tensor::cat(outputs, 1),
        }
    }
}
