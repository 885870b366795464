//! Recurrent layers, with the quantizers of their gates.

use burn::nn::gru::Gru;
use burn::nn::{GateController, Lstm, LstmState, Rnn, RnnState};
use burn::tensor::Tensor;
use burn_lean_graph::hooks::ForwardPass;

use super::gate::{Gate, Hidden, Sequence};
use crate::{ForwardQ, WeightQuantizer};

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
    let gate = Gate::new(&layer.gate, &Sequence::new(&sequence));
    let mut hidden = Hidden::first(state.map(|state| state.hidden), shape, &sequence);
    let mut outputs = Outputs::new(&sequence);
    for step in outputs.steps(reverse) {
        let mut next = layer.hidden_activation.forward(gate.sum(step, &hidden));
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
    let shared = Sequence::new(&sequence);
    let gate = |gate| Gate::new(gate, &shared);
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
        let input = activation.forward(input_gate.sum(step, &hidden));
        let forget = match &forget_gate {
            Some(gate) => activation.forward(gate.sum(step, &hidden)),
            None => input.clone().neg().add_scalar(1.0),
        };
        let output = activation.forward(output_gate.sum(step, &hidden));
        let candidate = layer.cell_activation.forward(cell_gate.sum(step, &hidden));
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
    let shared = Sequence::new(&sequence);
    let [update_gate, reset_gate, new_gate] = gates.map(|gate| Gate::new(gate, &shared));

    let mut hidden = Hidden::first(state, shape, &sequence);
    let mut outputs = Outputs::new(&sequence);
    for step in outputs.steps(reverse) {
        let activation = &layer.gate_activation;
        let update = activation.forward(update_gate.sum(step, &hidden));
        let reset = activation.forward(reset_gate.sum(step, &hidden));
        let candidate = match layer.reset_after {
            true => new_gate.of_input(step) + reset * new_gate.of_hidden(&hidden),
            false => new_gate.sum(step, &hidden.reset(reset)),
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
