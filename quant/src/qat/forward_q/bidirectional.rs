//! Recurrent layers in both directions, each with its own gates.

use burn::nn::gru::{BiGru, Gru};
use burn::nn::{BiLstm, BiRnn, Lstm, LstmState, Rnn, RnnState};
use burn::tensor::Tensor;

use super::rnn::{batch_first, gru, is_gru_prepared, is_lstm_prepared, is_prepared, lstm, rnn};
use crate::ForwardQ;

/// One direction: the sequence, the state to start from, and whether it begins at the end.
type Direction<L> = fn(&L, Tensor<3>, Option<Tensor<2>>, bool) -> (Tensor<3>, Tensor<2>);

/// Both directions of layers whose state is one tensor `[2, batch, d_hidden]`.
fn both<L>(
    layers: [&L; 2],
    sequence: Tensor<3>,
    state: Option<Tensor<3>>,
    run: Direction<L>,
) -> (Tensor<3>, Tensor<3>) {
    let of = |direction: usize| {
        let state = state.clone()?;
        Some(state.narrow(0, direction, 1).squeeze_dim(0))
    };
    let (output, state) = run(layers[0], sequence.clone(), of(0), false);
    let (reverse_output, reverse_state) = run(layers[1], sequence, of(1), true);
    (
        Tensor::cat(vec![output, reverse_output], 2),
        Tensor::stack(vec![state, reverse_state], 0),
    )
}

/// The sequence, and the states to start from, `[2, batch, d_hidden]`.
impl ForwardQ<(Tensor<3>, Option<RnnState<3>>)> for BiRnn {
    type Output = (Tensor<3>, RnnState<3>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<RnnState<3>>)) -> Self::Output {
        if ![&self.forward, &self.reverse]
            .into_iter()
            .any(|layer| is_prepared(&layer.gate))
        {
            return self.forward(sequence, state);
        }
        let run: Direction<Rnn> = |layer, sequence, state, reverse| {
            let (output, state) = rnn(layer, sequence, state.map(RnnState::new), reverse);
            (output, state.hidden)
        };
        let sequence = batch_first(sequence, self.batch_first);
        let state = state.map(|state| state.hidden);
        let (output, state) = both([&self.forward, &self.reverse], sequence, state, run);
        (batch_first(output, self.batch_first), RnnState::new(state))
    }
}

/// The sequence, and the states to start from, `[2, batch, d_hidden]`.
impl ForwardQ<(Tensor<3>, Option<LstmState<3>>)> for BiLstm {
    type Output = (Tensor<3>, LstmState<3>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<LstmState<3>>)) -> Self::Output {
        if ![&self.forward, &self.reverse]
            .into_iter()
            .any(is_lstm_prepared)
        {
            return self.forward(sequence, state);
        }
        let sequence = batch_first(sequence, self.batch_first);
        let of = |direction: usize| {
            let part = |state: &Tensor<3>| -> Tensor<2> {
                state.clone().narrow(0, direction, 1).squeeze_dim(0)
            };
            let state = state.as_ref()?;
            Some(LstmState::new(part(&state.cell), part(&state.hidden)))
        };
        let run = |layer: &Lstm, direction: usize| {
            lstm(layer, sequence.clone(), of(direction), direction == 1)
        };
        let (output, state) = run(&self.forward, 0);
        let (reverse_output, reverse_state) = run(&self.reverse, 1);
        let output = Tensor::cat(vec![output, reverse_output], 2);
        (
            batch_first(output, self.batch_first),
            LstmState::stack(vec![state, reverse_state], 0),
        )
    }
}

/// The sequence, and the hidden states to start from, `[2, batch, d_hidden]`.
impl ForwardQ<(Tensor<3>, Option<Tensor<3>>)> for BiGru {
    type Output = (Tensor<3>, Tensor<3>);

    fn forward_q(&self, (sequence, state): (Tensor<3>, Option<Tensor<3>>)) -> Self::Output {
        if ![&self.forward, &self.reverse]
            .into_iter()
            .any(is_gru_prepared)
        {
            return self.forward(sequence, state);
        }
        let run: Direction<Gru> = gru;
        let sequence = batch_first(sequence, self.batch_first);
        let (output, state) = both([&self.forward, &self.reverse], sequence, state, run);
        (batch_first(output, self.batch_first), state)
    }
}
