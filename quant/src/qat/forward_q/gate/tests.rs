//! Layers that multiply by codes, against the same ones with values.

use std::sync::{Arc, Mutex};

use burn::module::Module;
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::{
    BiLstm, BiLstmConfig, Initializer, Lstm, LstmConfig, LstmState, Rnn, RnnConfig, RnnState,
};
use burn::tensor::{Device, TensorData};

use super::*;
use crate::module::listen::listener::{Listener, listening};
use crate::module::listen::tap::Tap;
use crate::module::map_quantizers;
use crate::module::walk::Site;
use crate::range::observer::read;
use crate::{
    ConvertConfig, Dequantize, FakeQuantizeConfig, ForwardQ, Granularity, NumberFormat,
    ObserverConfig, QatConfig, QuantizedForward, Scheme, WeightConfig, calibrate,
};

const INPUTS: usize = 24;
const HIDDEN: usize = 16;

/// Weights and biases are from −this to this.
const LARGEST: f64 = 0.1;

/// Of the sum of a gate: it has 40 products of numbers up to 1 and two biases, and each addition rounds.
const ALLOWED: f32 = 48.0 * f32::EPSILON * 4.5;

/// Of a state: a gate's differences, in an LSTM those of all its gates with cells up to 7.
const OF_STATE: f32 = 4.0 * ALLOWED;

/// Of a state after 7 steps: with weights this small, later steps pass on little of a difference.
const OF_STATES: f32 = 100.0 * ALLOWED;

/// Numbers from −1 to 1 without order.
fn tensor<const D: usize>(shape: [usize; D], seed: u32) -> Tensor<D> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let numbers: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(numbers, shape), &Device::flex())
}

fn initializer() -> Initializer {
    Initializer::Uniform {
        min: -LARGEST,
        max: LARGEST,
    }
}

fn lstm() -> Lstm {
    let config = LstmConfig::new(INPUTS, HIDDEN, true);
    config.with_initializer(initializer()).init(&Device::flex())
}

fn gru(reset_after: bool) -> Gru {
    let config = GruConfig::new(INPUTS, HIDDEN, true).with_reset_after(reset_after);
    config.with_initializer(initializer()).init(&Device::flex())
}

/// A layer and its state.
trait Recurrent: Module {
    fn run(&self, x: Tensor<3>, state: Option<Vec<Tensor<2>>>) -> (Tensor<3>, Vec<Tensor<2>>);
}

impl Recurrent for Lstm {
    fn run(&self, x: Tensor<3>, state: Option<Vec<Tensor<2>>>) -> (Tensor<3>, Vec<Tensor<2>>) {
        let state = state.map(|state| LstmState::new(state[0].clone(), state[1].clone()));
        let (y, state) = self.forward_q((x, state));
        (y, vec![state.cell, state.hidden])
    }
}

impl Recurrent for Rnn {
    fn run(&self, x: Tensor<3>, state: Option<Vec<Tensor<2>>>) -> (Tensor<3>, Vec<Tensor<2>>) {
        let state = state.map(|state| RnnState::new(state[0].clone()));
        let (y, state) = self.forward_q((x, state));
        (y, vec![state.hidden])
    }
}

impl Recurrent for Gru {
    fn run(&self, x: Tensor<3>, state: Option<Vec<Tensor<2>>>) -> (Tensor<3>, Vec<Tensor<2>>) {
        let last = x.dims()[1] - 1;
        let y = self.forward_q((x, state.map(|state| state[0].clone())));
        let state = y.clone().narrow(1, last, 1).squeeze_dim(1);
        (y, vec![state])
    }
}

fn dynamic(format: NumberFormat, granularity: Granularity) -> Option<FakeQuantizeConfig> {
    let scheme = Scheme::symmetric(format).with_granularity(granularity);
    Some(FakeQuantizeConfig::new(scheme).with_observer(ObserverConfig::Memoryless))
}

/// Of inputs: none, one range for all, and one of each row or each step.
fn activations() -> [Option<FakeQuantizeConfig>; 4] {
    [
        None,
        QatConfig::new().activation,
        dynamic(NumberFormat::int8(), Granularity::PerToken),
        dynamic(NumberFormat::int8(), Granularity::PerTensor),
    ]
}

fn config(bits: u8, activation: Option<FakeQuantizeConfig>) -> QatConfig {
    QatConfig::new()
        .with_weight(WeightConfig::int(bits))
        .with_activation(activation)
}

/// A converted layer that multiplies by codes, whatever the speed of that, and the same with values.
fn converted<M: Module>(layer: M, config: &QatConfig, call: impl Fn(&M, Tensor<3>)) -> [M; 2] {
    let layer: M = config.prepare(layer).unwrap();
    let layer = match &config.activation {
        Some(_) => calibrate(layer, |layer| call(layer, tensor([4, 6, INPUTS], 2))).unwrap(),
        None => layer,
    };
    let (values, _) = ConvertConfig::new().convert(layer).unwrap();
    let codes = map_quantizers(values.clone(), |located| match located.site {
        Site::Weight => located.quantizer.with_dequantize(Dequantize::InProduct),
        _ => located.quantizer,
    });
    [codes, values]
}

fn recurrent<L: Recurrent>(layer: L, config: &QatConfig) -> [L; 2] {
    converted(layer, config, |layer, x| drop(layer.run(x, None)))
}

fn assert_near<const D: usize>(found: Tensor<D>, expected: Tensor<D>, allowed: f32) {
    assert_eq!(found.dims(), expected.dims());
    let [found, expected] = [found, expected].map(|x| read(x).unwrap());
    for (found, expected) in found.iter().zip(&expected) {
        let off = (found - expected).abs();
        assert!(off <= allowed, "{found} for {expected}");
    }
}

fn assert_same<const D: usize>(found: Tensor<D>, expected: Tensor<D>) {
    assert_near(found, expected, 0.0);
}

fn gates(layer: &Lstm) -> [&GateController; 3] {
    [&layer.input_gate, &layer.output_gate, &layer.cell_gate]
}

/// Whether any of its weights was turned into values.
fn has_values(gate: &Gate<'_>) -> bool {
    let ready = [&gate.input, &gate.hidden];
    ready.iter().any(|ready| ready.values.get().is_some())
}

#[test]
fn gates_multiply_by_codes_and_give_what_their_values_give() {
    // Floats that each step rounds by itself are multiplied step by step.
    let floats = dynamic(NumberFormat::E4M3, Granularity::PerTensor);
    for activation in activations().into_iter().chain([floats]) {
        for bits in [8, 4] {
            let [codes, values] = recurrent(lstm(), &config(bits, activation.clone()));
            for (batch, steps) in [(1, 1), (1, 7), (3, 1), (3, 7)] {
                let x = tensor([batch, steps, INPUTS], 3);
                let sequence = Sequence::new(&x);
                let given = Hidden::next(tensor([batch, HIDDEN], 5));
                let zeros = Hidden::first(None, [batch, HIDDEN], &x);
                for (codes, values) in gates(&codes).into_iter().zip(gates(&values)) {
                    let gate = Gate::new(codes, &sequence);
                    let of_values = Gate::new(values, &sequence);
                    for step in 0..steps {
                        for hidden in [&given, &zeros] {
                            let sum = gate.sum(step, hidden);
                            let apart = gate.of_input(step) + gate.of_hidden(hidden);
                            assert_same(sum.clone(), apart);
                            assert_near(sum, of_values.sum(step, hidden), ALLOWED);
                        }
                    }
                    assert!(!has_values(&gate));
                    assert!(has_values(&of_values));
                }
            }
        }
    }
}

/// `flips`: what is rounded depends on a product, so that its code may be the next one.
fn steps_give_what_values_give<L: Recurrent>(layer: L, states: u32, flips: bool) {
    for (activation, bits) in activations().into_iter().zip([8, 8, 4, 8]) {
        let [codes, values] = recurrent(layer.clone(), &config(bits, activation.clone()));
        let is_exact = activation.is_some();
        let of_codes = match flips && is_exact {
            true => HIDDEN as f32 * LARGEST as f32 / 100.0,
            false => 0.0,
        };
        for batch in [1, 3] {
            let x = tensor([batch, 7, INPUTS], 3);
            let state = (0..states).map(|part| tensor([batch, HIDDEN], 7 + part));
            for first in [None, Some(state.collect::<Vec<_>>())] {
                let (whole, last) = codes.run(x.clone(), first.clone());
                let mut state = first;
                for step in 0..7 {
                    let x = x.clone().narrow(1, step, 1);
                    let (y, next) = codes.run(x.clone(), state.clone());
                    let (_, expected) = values.run(x, state);
                    for (next, expected) in next.iter().zip(expected) {
                        assert_near(next.clone(), expected, OF_STATE + of_codes);
                    }
                    // Sums of integers are those of a whole sequence; floats are added in another order.
                    let allowed = if is_exact { 0.0 } else { OF_STATES };
                    assert_near(whole.clone().narrow(1, step, 1), y, allowed);
                    state = Some(next);
                }
                let allowed = if is_exact { 0.0 } else { OF_STATES };
                for (last, next) in last.into_iter().zip(state.unwrap()) {
                    assert_near(last, next, allowed);
                }
            }
        }
    }
}

#[test]
fn an_lstm_gives_what_it_gives_step_by_step_and_with_values() {
    steps_give_what_values_give(lstm(), 2, false);
}

#[test]
fn a_gru_gives_what_it_gives_step_by_step_and_with_values() {
    steps_give_what_values_give(gru(true), 1, false);
    steps_give_what_values_give(gru(false), 1, true);
}

#[test]
fn a_plain_recurrence_gives_what_it_gives_step_by_step_and_with_values() {
    let layer = RnnConfig::new(INPUTS, HIDDEN, true).with_initializer(initializer());
    steps_give_what_values_give(layer.init(&Device::flex()), 1, false);
}

#[test]
fn both_directions_of_an_lstm_are_two_that_multiply_by_codes() {
    let layer = || {
        let config = BiLstmConfig::new(INPUTS, HIDDEN, true).with_initializer(initializer());
        config.init(&Device::flex())
    };
    for activation in activations() {
        let allowed = if activation.is_some() { 0.0 } else { OF_STATES };
        let config = config(8, activation);
        let call = |layer: &BiLstm, x: Tensor<3>| drop(layer.forward_q((x, None)));
        let [codes, values] = converted(layer(), &config, call);
        for (batch, steps) in [(1, 1), (1, 7), (3, 1), (3, 7)] {
            let x = tensor([batch, steps, INPUTS], 3);
            for is_given in [false, true] {
                let part = |seed| tensor([2, batch, HIDDEN], seed);
                let state = || is_given.then(|| LstmState::new(part(5), part(6)));
                let of = |direction: usize| {
                    let of =
                        |x: Tensor<3>| -> Tensor<2> { x.narrow(0, direction, 1).squeeze_dim(0) };
                    state().map(|state| LstmState::new(of(state.cell), of(state.hidden)))
                };
                let (y, _) = codes.forward_q((x.clone(), state()));
                if steps == 1 {
                    let (expected, _) = values.forward_q((x.clone(), state()));
                    assert_near(y.clone(), expected, OF_STATE);
                }
                let (forward, _) = codes.forward.forward_q((x.clone(), of(0)));
                let (reverse, _) = codes.reverse.forward_q((x.clone().flip([1]), of(1)));
                let expected = Tensor::cat(vec![forward, reverse.flip([1])], 2);
                assert_near(y, expected, allowed);
            }
        }
    }
}

#[test]
fn outputs_that_are_rounded_are_rounded_before_they_are_added() {
    let config = config(8, QatConfig::new().activation).with_outputs(true);
    let [codes, values] = recurrent(lstm(), &config);
    let x = tensor([3, 7, INPUTS], 3);
    let sequence = Sequence::new(&x);
    let hidden = Hidden::next(tensor([3, HIDDEN], 5));
    let gate = Gate::new(&codes.cell_gate, &sequence);
    assert!(gate.sum_of_codes(2, &hidden).is_none());
    let steps = [&gate.input, &gate.hidden].map(|ready| {
        let output = ready.quantizers.and_then(|of| of.output.as_ref()).unwrap();
        output.qparams().unwrap().scale.into_scalar::<f32>()
    });
    // Numbers that lie between two codes may go to either.
    let allowed = ALLOWED + steps.iter().sum::<f32>();
    let expected = Gate::new(&values.cell_gate, &sequence).sum(2, &hidden);
    assert_near(gate.sum(2, &hidden), expected, allowed);
    assert!(!has_values(&gate));
}

#[test]
fn what_kernels_do_not_compute_is_left_to_burn() {
    for activation in [None, QatConfig::new().activation] {
        let [codes, values] = recurrent(lstm(), &config(8, activation));
        let x = tensor([3, 7, INPUTS], 3);
        let nan = Tensor::full([1, 1, 1], f32::NAN, &x.device());
        let broken = x.clone().slice_assign([1..2, 4..5, 0..1], nan);
        let [found, expected] = [&codes, &values].map(|layer| {
            let y = read(layer.run(broken.clone(), None).0).unwrap();
            y.iter().map(|y| y.is_nan()).collect::<Vec<bool>>()
        });
        assert_eq!(found, expected);
        assert_eq!(found.iter().filter(|is_nan| **is_nan).count(), 3 * HIDDEN);
        // A state of one example is that of all.
        let state = || Some(vec![tensor([1, HIDDEN], 7), tensor([1, HIDDEN], 8)]);
        let first = || x.clone().narrow(1, 0, 1);
        let [(found, _), (expected, _)] =
            [&codes, &values].map(|layer| layer.run(first(), state()));
        assert_near(found, expected, OF_STATE);
        let none = Tensor::<3>::zeros([3, 0, INPUTS], &x.device());
        assert_eq!(codes.forward_q((none, None)).0.dims(), [3, 0, HIDDEN]);

        let asks = |layer: &Lstm, x: &Tensor<3>| {
            let sequence = Sequence::new(x);
            has_values(&Gate::new(&layer.cell_gate, &sequence))
        };
        assert!(!asks(&codes, &x));
        assert!(!asks(&codes.valid(), &x));
        assert!(asks(&codes, &x.clone().autodiff()));
        let tap = Listener::Tap(Arc::new(Mutex::new(Tap::default())));
        assert!(asks(&listening(&codes, &tap), &x));
        // A bias that trains has a gradient.
        let training = codes.train();
        let (y, _) = training.run(x.clone().autodiff(), None);
        let grads = y.sum().backward();
        let bias = &training.cell_gate.input_transform.bias;
        assert!(bias.as_ref().unwrap().val().grad(&grads).is_some());
    }
}

#[test]
fn a_recording_computes_with_values_and_leaves_the_kernels_in_use() {
    let [codes, values] = recurrent(lstm(), &config(8, None));
    let x = tensor([3, 7, INPUTS], 3);
    let run = QuantizedForward::new();
    let recorded = run.run(&codes, x.clone(), |layer, x| layer.forward_q((x, None)).0);
    assert_near(recorded.unwrap(), values.run(x.clone(), None).0, OF_STATES);
    let sequence = Sequence::new(&x);
    assert!(!has_values(&Gate::new(&codes.cell_gate, &sequence)));
}

#[test]
fn a_conversion_looks_at_the_products_of_gates_as_at_those_of_other_layers() {
    let layer = LstmConfig::new(64, 64, true).init(&Device::flex());
    let prepared = config(8, None).prepare(layer).unwrap();
    let convert = ConvertConfig::new().with_dequantize(Dequantize::InProduct);
    let (_, report) = convert.convert(prepared).unwrap();
    assert_eq!(report.weights.len(), 8);
    for weight in &report.weights {
        let is_slow = |reason: &str| reason.contains("times as long as that with its floats");
        let is_looked_at = weight.dequantize == Dequantize::InProduct;
        assert!(
            is_looked_at || weight.why_once.as_deref().is_some_and(is_slow),
            "{weight:?}"
        );
    }
}
