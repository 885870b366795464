//! Burn's CTC loss against the sum over all alignments, in F32 and under autocast.

use burn::module::{Module, Param};
use burn::tensor::activation::log_softmax;
use burn::tensor::module::ctc_loss as burn_ctc_loss;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_lean::amp::{AmpError, Autocast, Fallback, GraphError};

use crate::acoustic_model::ctc_loss;
use crate::batches::BLANK;
use crate::decoding::collapse;
use crate::support::{numbers, on_tracked, values};

const STEPS: usize = 5;
const CLASSES: usize = 3;

/// What is said by each utterance: nothing repeated, a repeat that needs a blank, a single symbol.
const SAID: [&[usize]; 3] = [&[0, 1], &[1, 1, 0], &[0]];

/// ln Σ exp.
fn log_sum_exp(terms: &[f64]) -> f64 {
    let most = terms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match most == f64::NEG_INFINITY {
        true => most,
        false => {
            most + terms
                .iter()
                .map(|term| (term - most).exp())
                .sum::<f64>()
                .ln()
        }
    }
}

/// Mean over the utterances of −ln P per symbol: every one of the `CLASSES^STEPS` paths is looked
/// at, and those that collapse to what is said are summed up.
fn by_definition(logits: &[f64]) -> f64 {
    let utterances = SAID.iter().zip(logits.chunks(STEPS * CLASSES));
    let losses = utterances.map(|(said, logits)| {
        let log_probabilities: Vec<f64> = logits
            .chunks(CLASSES)
            .flat_map(|step| step.iter().map(|logit| logit - log_sum_exp(step)))
            .collect();
        let paths = (0..CLASSES.pow(STEPS as u32)).filter_map(|code| {
            let path: Vec<usize> = (0..STEPS as u32)
                .map(|step| code / CLASSES.pow(step) % CLASSES)
                .collect();
            let steps = path.iter().enumerate();
            (collapse(&path) == *said).then(|| {
                steps
                    .map(|(step, class)| log_probabilities[step * CLASSES + class])
                    .sum()
            })
        });
        -log_sum_exp(&paths.collect::<Vec<f64>>()) / said.len() as f64
    });
    losses.sum::<f64>() / SAID.len() as f64
}

/// The derivative, by central differences of the definition.
fn gradient(logits: &[f64], step: f64) -> Vec<f64> {
    let at = |index: usize, offset: f64| {
        let mut moved = logits.to_vec();
        moved[index] += offset;
        by_definition(&moved)
    };
    let slope = |index| (at(index, step) - at(index, -step)) / (2.0 * step);
    (0..logits.len()).map(slope).collect()
}

/// Logits between ±`magnitude` that BF16 has, too.
fn logits(seed: u64, magnitude: f32) -> Vec<f32> {
    let count = SAID.len() * STEPS * CLASSES;
    let half = |x: f32| half::bf16::from_f32(magnitude * x).to_f32();
    numbers(seed, count).into_iter().map(half).collect()
}

/// Labels filled up with blanks, and their numbers.
fn labels(device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let longest = 3;
    let filled = SAID.iter().flat_map(|said| {
        let classes = said.iter().map(|symbol| 1 + *symbol as i64);
        classes.chain(std::iter::repeat(BLANK as i64)).take(longest)
    });
    let lengths: Vec<i64> = SAID.iter().map(|said| said.len() as i64).collect();
    (
        Tensor::from_data(
            TensorData::new(filled.collect(), [SAID.len(), longest]),
            device,
        ),
        Tensor::from_data(TensorData::new(lengths, [SAID.len()]), device),
    )
}

/// Shows the logits as a parameter.
#[derive(Module, Debug)]
struct Logits {
    logits: Param<Tensor<3>>,
}

impl Logits {
    fn new(logits: &[f32], device: &Device) -> Self {
        let data = TensorData::new(logits.to_vec(), [SAID.len(), STEPS, CLASSES]);
        Self {
            logits: Param::from_data(data, device),
        }
    }
}

/// Value and gradient of a loss against the definition; `tolerance` is relative to the value, and
/// absolute for the gradient, whose entries are at most one.
fn check(logits: &[f32], found: (f32, Vec<f32>), tolerance: f64) {
    let logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    let (loss, gradients) = found;
    let expected = by_definition(&logits);
    assert!(
        (f64::from(loss) - expected).abs() <= tolerance * expected.abs().max(1.0),
        "loss {loss}, not {expected}"
    );
    let largest = logits
        .iter()
        .fold(1.0_f64, |most, logit| most.max(logit.abs()));
    // A path's probability is the exponential of a sum over the steps; its rounding in F32 is
    // relative to the sum.
    let rounding = 2e-7 * STEPS as f64 * largest;
    let slopes = gradient(&logits, 1e-4);
    for (index, (found, expected)) in gradients.iter().zip(slopes).enumerate() {
        assert!(
            (f64::from(*found) - expected).abs() <= tolerance + rounding,
            "gradient {index}: {found}, not {expected}"
        );
    }
}

#[test]
fn the_definition_agrees_with_counting() {
    let of = |said: &[usize]| {
        let paths = 0..CLASSES.pow(STEPS as u32);
        let path = |code: usize| -> Vec<usize> {
            let digits = (0..STEPS as u32).map(|step| code / CLASSES.pow(step) % CLASSES);
            digits.collect()
        };
        paths.filter(|code| collapse(&path(*code)) == said).count() as f64
    };
    // U symbols, no two neighbours equal, have C(T + U, 2U) alignments to T steps.
    assert_eq!(of(&[0]), 15.0);
    assert_eq!(of(&[0, 1]), 35.0);
    // A pair of equal ones takes a step for the blank between them: C(T + U − 1, 2U).
    assert_eq!(of(&[1, 1, 0]), 7.0);
    // All 243 paths are equally likely.
    let uniform = vec![0.0; SAID.len() * STEPS * CLASSES];
    let losses = SAID.map(|said| (243.0 / of(said)).ln() / said.len() as f64);
    let expected = losses.iter().sum::<f64>() / 3.0;
    assert!((by_definition(&uniform) - expected).abs() < 1e-12);
}

#[test]
fn value_and_gradient_are_those_of_the_sum_over_all_alignments() {
    on_tracked(|device| {
        for magnitude in [1.0, 30.0, 1000.0] {
            let numbers = logits(11, magnitude);
            let model = Logits::new(&numbers, &device);
            let (labels, lengths) = labels(&device);
            let loss = ctc_loss(model.logits.val(), labels, lengths);
            let value = loss.clone().into_scalar::<f32>();
            let gradient = model.logits.grad(&loss.backward()).unwrap();
            check(&numbers, (value, values(gradient)), 2e-5);
        }
    });
}

/// The products in half precision, the loss in F32: whatever the size of the logits.
#[test]
fn under_autocast_the_loss_has_its_value_at_every_magnitude() {
    on_tracked(|device| {
        for dtype in [FloatDType::F16, FloatDType::BF16] {
            let autocast = Autocast::new(dtype).with_fallback(Fallback::Emulate);
            for magnitude in [1.0, 100.0, 1000.0, 30_000.0] {
                let numbers = logits(12, magnitude);
                let model = Logits::new(&numbers, &device);
                let (labels, lengths) = labels(&device);
                // A product with one is half, and exact.
                let one = Tensor::<3>::from_data(
                    TensorData::new(vec![1f32, 0., 0., 0., 1., 0., 0., 0., 1.], [1, 3, 3]),
                    &device,
                );
                let input = (one, labels, lengths);
                let loss = autocast
                    .run(&model, input, |model, (one, labels, lengths)| {
                        let one = one.repeat_dim(0, SAID.len());
                        let logits = model.logits.val().matmul(one);
                        let [batch, steps, _] = logits.dims();
                        let log_probabilities = log_softmax(logits, 2).swap_dims(0, 1);
                        let all = Tensor::full([batch], steps as i64, &lengths.device());
                        let counts = lengths.clone().float();
                        // What `CTCLoss` does, but for its look at the lengths.
                        let losses = burn_ctc_loss(log_probabilities, labels, all, lengths, BLANK);
                        (losses / counts).mean()
                    })
                    .unwrap();
                let value = loss.clone().into_scalar::<f32>();
                let gradient = model.logits.grad(&loss.backward()).unwrap();
                // The gradient of a half product is half.
                let tolerance = match dtype {
                    FloatDType::BF16 => 4e-3,
                    _ => 5e-4,
                };
                check(&numbers, (value, values(gradient)), tolerance);
            }
        }
    });
}

/// With debug assertions Burn's module reads the lengths, which a recording does not have: that is
/// said, and the loss outside of the recording is the way.
#[test]
fn a_loss_that_reads_lengths_in_a_recording_is_refused_with_the_place() {
    let device = Device::flex().autodiff();
    let numbers = logits(13, 1.0);
    let model = Logits::new(&numbers, &device);
    let input = labels(&device);
    let autocast = Autocast::new(FloatDType::BF16);
    let result = autocast.run(&model, input, |model, (labels, lengths)| {
        ctc_loss(model.logits.val(), labels, lengths)
    });
    match result {
        Ok(loss) if !cfg!(debug_assertions) => {
            let value = loss.clone().into_scalar::<f32>();
            let gradient = model.logits.grad(&loss.backward()).unwrap();
            check(&numbers, (value, values(gradient)), 2e-5);
        }
        Err(AmpError::Graph(GraphError::Forward { .. })) if cfg!(debug_assertions) => {}
        other => panic!("{other:?}"),
    }
}

/// Where the symbols cannot be said in so few steps there is no alignment.
#[test]
fn a_string_that_does_not_fit_has_no_probability() {
    let device = Device::flex();
    let labels = Tensor::<2, Int>::from_data([[1, 1]], &device);
    let lengths = Tensor::<1, Int>::from_data([2], &device);
    let of = |steps: usize| {
        let logits = Tensor::<3>::zeros([1, steps, CLASSES], &device);
        ctc_loss(logits, labels.clone(), lengths.clone()).into_scalar::<f32>()
    };
    assert_eq!(of(2), f32::INFINITY);
    // One path of 27, per symbol.
    assert!((f64::from(of(3)) - 27_f64.ln() / 2.0).abs() < 1e-5);
}
