//! Recurrences over sequences of any length: one step in the file, run as often as there are steps.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig};
use burn::nn::{
    BiGru, BiGruConfig, BiLstm, BiLstmConfig, Gru, GruConfig, Linear, LinearConfig, Lstm,
    LstmConfig, LstmState, PaddingConfig1d, Rnn, RnnConfig,
};
use burn::tensor::activation::{relu, sigmoid};
use burn::tensor::{Device, Int, Tensor, TensorData, s};
use burn_lean::deploy::{
    Arithmetic, Backend, DeployError, EngineConfig, Execution, Export, Form, LayerReport, OpenAxis,
};
use burn_lean::quant::{PtqConfig, PtqMode, QuantizedForward};

use crate::judge::{close, for_the_judge, operators, output_step, within_steps};
use crate::open_axes::{open, runs, sequence};
use crate::support::{each_device, on_each, tensor, values, with_numbers};

/// Batch and length.
const SIZES: [[usize; 2]; 6] = [[2, 6], [1, 1], [3, 2], [2, 3], [1, 13], [2, 40]];

fn sequences(width: usize, device: &Device) -> [Tensor<3>; 6] {
    SIZES.map(|[batch, length]| tensor::<3>(length as u64, [batch, length, width], device))
}

#[derive(Module, Debug)]
struct Layers {
    lstm: Lstm,
    gru: Gru,
    rnn: Rnn,
    head: Linear,
}

/// One after another, and what is computed before, between and behind.
#[test]
fn recurrent_layers_of_burn_take_sequences_of_any_length() {
    on_each(|device| {
        let layers = Layers {
            lstm: LstmConfig::new(4, 5, true).init(device),
            gru: GruConfig::new(5, 6, true).init(device),
            rnn: RnnConfig::new(6, 4, true).init(device),
            head: LinearConfig::new(4, 3).init(device),
        };
        let layers = with_numbers(layers, 3);
        let forward = |layers: &Layers, x: Tensor<3>| {
            let (x, state) = layers.lstm.forward(x.clone() * 2.0, None);
            let x = layers.gru.forward(x.tanh(), None) + state.cell.mean().unsqueeze() * 0.1;
            let (x, last) = layers.rnn.forward(x, None);
            layers.head.forward(x + last.hidden.unsqueeze_dim(1))
        };
        let exported = runs(&layers, &[sequence()], &sequences(4, device), forward);
        assert_eq!(exported.fixed_batch, None);
        let shape = &exported.model.outputs()[0].shape;
        assert_eq!(shape[..2], [open("batch"), open("sequence")]);
        let loops = operators(&exported);
        assert_eq!(loops.iter().filter(|name| **name == "Loop").count(), 3);
    });
}

#[derive(Module, Debug)]
struct BothWays {
    lstm: BiLstm,
    gru: BiGru,
}

#[test]
fn layers_of_both_directions_do_too() {
    on_each(|device| {
        for batch_first in [true, false] {
            let layers = BothWays {
                lstm: BiLstmConfig::new(4, 3, true)
                    .with_batch_first(batch_first)
                    .init(device),
                gru: BiGruConfig::new(6, 2, true)
                    .with_batch_first(batch_first)
                    .init(device),
            };
            let layers = with_numbers(layers, 7);
            let forward = |layers: &BothWays, x: Tensor<3>| {
                let (x, _) = layers.lstm.forward(x, None);
                layers.gru.forward(x, None).0
            };
            let axes = match batch_first {
                true => vec![sequence()],
                false => {
                    let axes = [("sequence", 0), ("batch", 1)];
                    axes.map(|(name, axis)| OpenAxis::new(name, [(0, axis)]))
                        .to_vec()
                }
            };
            let inputs = sequences(4, device).map(|x| match batch_first {
                true => x,
                false => x.swap_dims(0, 1),
            });
            runs(&layers, &axes, &inputs, forward);
        }
    });
}

/// A cell of one's own, whose first state is learned.
#[derive(Module, Debug)]
struct Cell {
    input: Linear,
    state: Linear,
    first: Param<Tensor<2>>,
}

impl Cell {
    fn new(device: &Device) -> Self {
        let cell = Self {
            input: LinearConfig::new(4, 10).init(device),
            state: LinearConfig::new(5, 10).with_bias(false).init(device),
            first: Param::from_tensor(Tensor::zeros([1, 5], device)),
        };
        with_numbers(cell, 11)
    }

    fn step(&self, x: Tensor<2>, h: Tensor<2>) -> Tensor<2> {
        let gates = self.input.forward(x) + self.state.forward(h.clone());
        let [gate, new]: [Tensor<2>; 2] = gates.chunk(2, 1).try_into().unwrap();
        let gate = sigmoid(gate);
        gate.clone() * new.tanh() + (gate.neg() + 1.0) * h
    }

    fn states(&self, x: &Tensor<3>, begin: Tensor<2>, back: bool) -> Vec<Tensor<2>> {
        let [_, length, _] = x.dims();
        let (mut h, mut states) = (begin, Vec::new());
        for step in 0..length {
            let at = match back {
                true => length - 1 - step,
                false => step,
            };
            h = self.step(x.clone().slice(s![.., at, ..]).squeeze_dim(1), h);
            states.push(h.clone());
        }
        states
    }
}

#[test]
fn cells_of_ones_own_are_loops_as_well() {
    on_each(|device| {
        let cell = Cell::new(device);
        let inputs = sequences(4, device);
        let first = |cell: &Cell, x: &Tensor<3>| cell.first.val().expand([x.dims()[0], 5]);
        // All states and the last one; in both directions; the initial one before the others.
        let all = |cell: &Cell, x: Tensor<3>| {
            let states = cell.states(&x, first(cell, &x), false);
            let last = states.last().unwrap().clone();
            Tensor::stack::<3>(states, 1) * last.unsqueeze_dim(1)
        };
        let exported = runs(&cell, &[sequence()], &inputs, all);
        assert!(operators(&exported).contains(&"Loop"));
        let back = |cell: &Cell, x: Tensor<3>| {
            let mut states = cell.states(&x, first(cell, &x), true);
            states.reverse();
            let ahead = cell.states(&x, first(cell, &x), false);
            let both = [states, ahead].map(|states| Tensor::stack::<3>(states, 1));
            Tensor::cat(both.to_vec(), 2)
        };
        // The first product of both is one, before the loops, which have a step less: none of sequences of one.
        let export = Export::record_open(&cell, &inputs[0], &[sequence()], back).unwrap();
        let engine = EngineConfig::new().compile(export).unwrap();
        close(
            engine.run(&inputs[1]).unwrap(),
            back(&cell, inputs[1].clone()),
        );
        let longer = inputs.clone().into_iter().filter(|x| x.dims()[1] > 1);
        runs(&cell, &[sequence()], &longer.collect::<Vec<_>>(), back);
        let shifted = |cell: &Cell, x: Tensor<3>| {
            let begin = first(cell, &x);
            let states = cell.states(&x, begin.clone(), false);
            let all = std::iter::once(begin).chain(states);
            let all = all.map(|h| h.unsqueeze_dim::<3>(1)).collect();
            Tensor::cat(all, 1)
        };
        let exported = runs(&cell, &[sequence()], &inputs, shifted);
        assert_eq!(exported.model.outputs()[0].shape[1], open("sequence + 1"));
        // A result for the whole sequence alone.
        let last = |cell: &Cell, x: Tensor<3>| {
            let states = cell.states(&x, first(cell, &x), false);
            states.last().unwrap().clone()
        };
        runs(&cell, &[sequence()], &inputs, last);
    });
}

/// With its state in and out: sequences that come in pieces.
#[test]
fn a_state_that_is_given_goes_on() {
    on_each(|device| {
        let lstm = LstmConfig::new(4, 5, true).init(device);
        let lstm = with_numbers(lstm, 5);
        let forward = |lstm: &Lstm, (x, state): (Tensor<3>, (Tensor<2>, Tensor<2>))| {
            let (y, state) = lstm.forward(x, Some(LstmState::new(state.0, state.1)));
            let ends = [state.cell, state.hidden].map(|end| end.unsqueeze_dim::<3>(1));
            Tensor::cat(vec![y, ends[0].clone(), ends[1].clone()], 1)
        };
        let inputs = sequences(4, device).map(|x| {
            let of = |seed| tensor::<2>(seed, [x.dims()[0], 5], device);
            (x.clone(), (of(1), of(2)))
        });
        runs(&lstm, &[sequence()], &inputs, forward);
    });
}

#[derive(Module, Debug)]
struct Acoustic {
    conv: Conv1d,
    lstm: Lstm,
    head: Linear,
}

impl Acoustic {
    fn new(device: &Device) -> Self {
        let padding = PaddingConfig1d::Explicit(1, 1);
        let net = Self {
            conv: Conv1dConfig::new(6, 8, 3)
                .with_stride(2)
                .with_padding(padding)
                .init(device),
            lstm: LstmConfig::new(8, 7, true).init(device),
            head: LinearConfig::new(7, 5).init(device),
        };
        with_numbers(net, 9)
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let x = relu(self.conv.forward(x)).swap_dims(1, 2);
        self.head.forward(self.lstm.forward(x, None).0)
    }
}

/// Half as many steps as there are frames: a length that the convolution computes.
#[test]
fn a_recurrence_behind_a_convolution_has_its_length() {
    on_each(|device| {
        let net = Acoustic::new(device);
        let frames = OpenAxis::new("frames", [(0, 2)]);
        let inputs = [[2, 12], [1, 1], [3, 4], [2, 31], [1, 80]]
            .map(|[batch, length]| tensor::<3>(length as u64, [batch, 6, length], device));
        runs(&net, &[frames], &inputs, |net: &Acoustic, x| net.forward(x));
    });
}

/// Codes times codes in each step, in the engine and in onnxruntime, for lengths that were not recorded: on grids
/// that are known, and on those of each step's own values.
#[test]
fn quantized_recurrences_take_sequences_of_any_length() {
    each_device(|target| {
        let device = &target.device;
        let forward = |net: &Acoustic, x: Tensor<3>| net.forward(x);
        let of =
            |[batch, length]: [usize; 2]| tensor::<3>(length as u64, [batch, 6, length], device);
        for mode in [PtqMode::Static, PtqMode::Dynamic] {
            let batches = [[4, 16], [4, 24]].map(of);
            let config = PtqConfig::new().with_mode(mode).with_progress(false);
            let quantized = config.quantize_for(Acoustic::new(device), || batches.clone(), forward);
            let net = quantized.unwrap().0.valid();
            let frames = || [OpenAxis::new("frames", [(0, 2)])];
            let record = || Export::record_open(&net, &of([2, 12]), &frames(), forward).unwrap();
            let exported = record().to_onnx(Form::Qdq).unwrap();
            assert_eq!(record().quantization().left_float().count(), 0);
            let config = EngineConfig::new()
                .with_backend(Some(Backend::Own))
                .with_arithmetic(Arithmetic::Integer);
            let engine = config.compile(record()).unwrap();
            let layers = engine.report().layers;
            let is_integer = |layer: &LayerReport| layer.execution == Execution::Integer;
            assert!(layers.iter().all(is_integer), "{layers:?}");
            for part in ["conv.", "lstm.", "head."] {
                let is_there = layers.iter().any(|layer| layer.path.starts_with(part));
                assert!(is_there, "{part}: {layers:?}");
            }
            for size in [[2, 12], [1, 1], [3, 40]] {
                let x = of(size);
                let fake = QuantizedForward::new()
                    .run(&net, x.clone(), forward)
                    .unwrap();
                within_steps(engine.run(&x).unwrap(), fake.clone(), 4.0);
                let step = 4.0 * output_step(&values(fake.clone()));
                for_the_judge(&exported, &x, &fake, Some(step));
            }
        }
    });
}

/// The reason why an axis of a loop cannot stay open.
fn refused(cell: &Cell, forward: impl Fn(&Cell, Tensor<3>) -> Tensor<2>) -> String {
    let x = tensor::<3>(1, [2, 8, 4], &Device::flex());
    match Export::record_open(cell, &x, &[sequence()], forward) {
        Err(DeployError::OpenAxis { reason, .. }) => reason,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it stays open"),
    }
}

#[test]
fn loops_that_are_none_are_named() {
    let cell = Cell::new(&Device::flex());
    let begin = |cell: &Cell| cell.first.val().expand([2, 5]);
    let last = |cell: &Cell, x: &Tensor<3>| {
        let states = cell.states(x, begin(cell), false);
        states.last().unwrap().clone()
    };
    // Two steps before.
    let reason = refused(&cell, |cell, x| {
        let (mut before, mut h) = (begin(cell), begin(cell));
        for step in 0..x.dims()[1] {
            let x = x.clone().slice(s![.., step, ..]).squeeze_dim(1);
            let next = cell.step(x, h.clone() + before);
            before = h;
            h = next;
        }
        h
    });
    assert_says!(reason, "a loop over it");
    // Short sequences are another computation, in other ways.
    let reason = refused(&cell, |cell, x| match x.dims()[1] {
        1..=2 => {
            let mean = x.mean_dim(1).squeeze_dim::<2>(1);
            mean.matmul(cell.input.weight.val()).slice(s![.., ..5])
        }
        _ => last(cell, &x),
    });
    assert_says!(reason, "is another computation");
    let reason = refused(&cell, |cell, x| {
        let length = x.dims()[1];
        last(cell, &x) / (length - 1).max(1) as f32
    });
    assert_says!(reason, "`div_scalar`");
    let reason = refused(&cell, |cell, x| {
        let x = match x.dims()[1] < 2 {
            true => Tensor::cat(vec![x.clone(), x], 1),
            false => x,
        };
        last(cell, &x)
    });
    assert_says!(reason, "is another computation");
    let reason = refused(&cell, |cell, x| {
        let mut states = cell.states(&x, begin(cell), x.dims()[1] < 3);
        states.pop().unwrap()
    });
    assert_says!(reason, "is another computation");
    // And so are long ones.
    let reason = refused(&cell, |cell, x| match x.dims()[1] > 15 {
        true => last(cell, &x).exp(),
        false => last(cell, &x),
    });
    assert!(!reason.is_empty());
    // As many steps as no size says.
    let reason = refused(&cell, |cell, x| {
        let length = x.dims()[1].min(6);
        last(cell, &x.slice(s![.., ..length, ..]))
    });
    assert!(!reason.is_empty());
}

/// Another result of the same loop.
#[test]
fn which_state_is_the_result_is_seen() {
    let device = Device::flex();
    let lstm = with_numbers(LstmConfig::new(4, 5, true).init(&device), 5);
    let x = tensor::<3>(1, [2, 8, 4], &device);
    let forward = |lstm: &Lstm, x: Tensor<3>| {
        let length = x.dims()[1];
        let (_, state) = lstm.forward(x, None);
        match length > 12 {
            true => state.cell,
            false => state.hidden,
        }
    };
    let export = Export::record_open(&lstm, &x, &[sequence()], forward);
    assert_matches!(export, Err(DeployError::OpenAxis { .. }));
}

/// Of integers beside the sequence each step takes its part, as of a mask or of tokens.
#[test]
fn integers_are_read_step_by_step() {
    on_each(|device| {
        let cell = Cell::new(device);
        let forward = |cell: &Cell, (x, mask): (Tensor<3>, Tensor<2, Int>)| {
            let [batch, length, _] = x.dims();
            let mut h = cell.first.val().expand([batch, 5]);
            let mut all = Vec::new();
            for step in 0..length {
                let next = x.clone().slice(s![.., step, ..]).squeeze_dim(1);
                let next = cell.step(next, h.clone());
                let is_there = mask.clone().slice(s![.., step..step + 1]).float();
                h = next * is_there.clone() + h * (is_there.neg() + 1.0);
                all.push(h.clone());
            }
            Tensor::stack::<3>(all, 1)
        };
        let inputs = sequences(4, device).map(|x| {
            let [batch, length, _] = x.dims();
            let mask: Vec<i32> = (0..batch * length)
                .map(|at| i32::from(at % 3 > 0))
                .collect();
            let mask = TensorData::new(mask, [batch, length]);
            (x, Tensor::<2, Int>::from_data(mask, device))
        });
        let axis = OpenAxis::new("sequence", [(0, 1), (1, 1)]);
        let exported = runs(&cell, &[axis], &inputs, forward);
        assert!(operators(&exported).contains(&"Loop"));
    });
}

/// Where states of all layers come in one tensor, and with a table of which each step has a row.
#[test]
fn states_and_rows_are_parts_of_tensors() {
    on_each(|device| {
        let cell = Cell::new(device);
        let forward = |cell: &Cell, (x, states): (Tensor<3>, Tensor<3>)| {
            let [_, length, _] = x.dims();
            let mut h = states.clone().slice(s![1, .., ..]).squeeze_dim::<2>(0);
            let mut all = Vec::new();
            for step in 0..length {
                let x = x.clone().slice(s![.., step, ..]).squeeze_dim(1);
                let row = cell
                    .state
                    .weight
                    .val()
                    .slice(s![.., ..5])
                    .slice(s![step % 5, ..]);
                h = cell.step(x, h) + row;
                all.push(h.clone());
            }
            let first = states.slice(s![0, .., ..]).squeeze_dim::<2>(0);
            Tensor::stack::<3>(all, 1) + first.unsqueeze_dim(1)
        };
        // A table that is shorter than the sequence is none that each step has a row of.
        let of = |length: usize| {
            let x = tensor::<3>(length as u64, [2, length, 4], device);
            (x, tensor::<3>(7, [2, 2, 5], device))
        };
        let export = Export::record_open(&cell, &of(8), &[sequence()], forward);
        assert_matches!(export, Err(DeployError::OpenAxis { .. }));
        let forward = |cell: &Cell, (x, states): (Tensor<3>, Tensor<3>)| {
            let h = states.clone().slice(s![1, .., ..]).squeeze_dim::<2>(0);
            let all = Tensor::stack::<3>(cell.states(&x, h, false), 1);
            let first = states.slice(s![0, .., ..]).squeeze_dim::<2>(0);
            all + first.unsqueeze_dim(1)
        };
        runs(&cell, &[sequence()], &[6, 1, 2, 19].map(of), forward);
    });
}
