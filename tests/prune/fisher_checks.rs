//! Rows from batched passes that are not those of plain ones are found, in whichever pass they are.

use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor, TensorData};
use burn_lean::prune::{Fisher, FisherConfig, PruneError, Selection, fisher::GradientMethod};

use crate::support::{numbers, on_each, tensor, with_numbers};

/// Sequences `[batch, length, 3]`, and 1 for each token that counts `[batch, length]`.
type Sequences = (Tensor<3>, Tensor<2>);

const LENGTH: usize = 6;

/// The mean over the tokens of all sequences: of the sequences only where they are equally long.
fn masked_mean(model: &Linear, (x, counts): &Sequences) -> Tensor<1> {
    let losses: Tensor<2> = model.forward(x.clone()).square().sum_dim(2).squeeze_dim(2);
    (losses * counts.clone()).sum() / counts.clone().sum()
}

fn sequences(seed: u64, lengths: &[usize], device: &Device) -> Sequences {
    let count = lengths.len();
    let counts = lengths
        .iter()
        .flat_map(|length| (0..LENGTH).map(move |at| if at < *length { 1.0f32 } else { 0.0 }));
    let counts = TensorData::new(counts.collect::<Vec<_>>(), [count, LENGTH]);
    let x = tensor::<3>(seed, [count, LENGTH, 3], device);
    (x, Tensor::from_data(counts, device))
}

/// All rows of these batches, by batched passes and by plain ones.
fn both(batches: &[Sequences], device: &Device) -> [Fisher; 2] {
    let linear = with_numbers(LinearConfig::new(3, 2).init(device), 1);
    let selection = Selection::of(&linear, None).unwrap();
    let n = batches.iter().map(|(x, _)| x.dims()[0]).sum();
    [GradientMethod::Batched, GradientMethod::Plain].map(|method| {
        let config = FisherConfig::new(n).with_method(method);
        let batches = batches.iter().cloned();
        let fisher = config.collect(&linear, &selection, masked_mean, batches);
        fisher.unwrap()
    })
}

fn assert_same(found: &Fisher, plain: &Fisher) {
    for row in 0..plain.report.samples {
        let rows = [found, plain].map(|fisher| fisher.gradients.row(row).unwrap());
        assert_eq!(rows[0], rows[1], "row {row}");
    }
    assert!((found.report.loss - plain.report.loss).abs() < 1e-6);
}

#[test]
fn a_masked_mean_is_found_out_where_its_first_sequences_are_equally_long() {
    on_each(|device| {
        let lengths: Vec<usize> = (0..20).map(|at| 1 + at % LENGTH).collect();
        let batches = [
            sequences(1, &[LENGTH; 64], device),
            sequences(2, &[LENGTH; 5], device),
            sequences(3, &lengths, device),
            sequences(4, &[LENGTH; 3], device),
        ];
        let [found, plain] = both(&batches, device);
        let reason = found.report.fallback.clone().unwrap();
        assert_says!(reason, "its loss is not their mean");
        assert_same(&found, &plain);
    });
}

#[test]
fn sequences_that_are_all_equally_long_stay_batched() {
    let device = Device::flex();
    let batches = [
        sequences(1, &[4; 64], &device),
        sequences(2, &[4; 9], &device),
    ];
    let [found, plain] = both(&batches, &device);
    assert_eq!(found.report.fallback, None);
    assert_eq!(found.report.batched_rows, 73);
    for row in 0..73 {
        let rows = [&found, &plain].map(|fisher| fisher.gradients.row(row).unwrap());
        for (found, plain) in rows[0].iter().zip(&rows[1]) {
            assert!((found - plain).abs() < 1e-5, "row {row}");
        }
    }
}

/// A few wrong rows may go unseen in one pass; not once a later one tells that there are such rows.
#[test]
fn rows_from_before_a_wrong_one_are_taken_again() {
    let device = Device::flex();
    // The mean length is that of most: their rows are right, those of the odd two are not.
    let mut odd = [4; 64];
    (odd[20], odd[41]) = (3, 5);
    let batches = [
        sequences(1, &odd, &device),
        sequences(2, &[1, 6, 3, 4, 2], &device),
        sequences(3, &[2; 10], &device),
    ];
    let [found, plain] = both(&batches, &device);
    assert!(found.report.fallback.is_some());
    assert_eq!(found.report.batched_rows, 0);
    assert_same(&found, &plain);
}

/// The variance over one example is zero by zero; over several it mixes them.
#[test]
fn a_plain_row_that_is_no_number_does_not_agree_with_one_that_is() {
    let device = Device::flex();
    let linear = with_numbers(LinearConfig::new(3, 2).init(&device), 1);
    let selection = Selection::of(&linear, None).unwrap();
    let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).var(0).mean();
    let batch = tensor::<2>(2, [4, 3], &device);
    let collected = FisherConfig::new(4).collect(&linear, &selection, loss, [batch]);
    let error = collected.map(|fisher| fisher.report).unwrap_err();
    assert_matches!(error, PruneError::NonFiniteGradient { .. });
}

/// Rows of more columns than a device may add up in one go, and no multiple of that: one number in them is none.
#[test]
fn a_number_that_is_none_is_found_wherever_it_is_in_a_long_row() {
    const WIDTH: usize = 3 * 32_768 + 397;
    on_each(|device| {
        let linear = LinearConfig::new(WIDTH, 1).with_bias(false).init(device);
        let selection = Selection::of(&linear, None).unwrap();
        // The gradient of a row is its example.
        let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).mean();
        let collect = |changed: &dyn Fn(&mut [f32]), method| {
            let mut x = numbers(1, 3 * WIDTH);
            changed(&mut x);
            let x = Tensor::<2>::from_data(TensorData::new(x, [3, WIDTH]), device);
            let config = FisherConfig::new(3).with_method(method);
            config.collect(&linear, &selection, loss, [x])
        };
        for method in [GradientMethod::Batched, GradientMethod::Plain] {
            for (row, column, number) in [
                (0, 0, f32::NAN),
                (1, 70_000, f32::INFINITY),
                (1, 3 * 32_768, f32::NAN),
                (2, WIDTH - 1, f32::NEG_INFINITY),
            ] {
                let found = collect(&|x| x[row * WIDTH + column] = number, method);
                match found.map(|fisher| fisher.report) {
                    Err(PruneError::NonFiniteGradient { sample, index, .. }) => {
                        assert_eq!((sample, index), (row, column), "{method:?}");
                    }
                    other => panic!("{method:?}, {number} in {row}, {column}: {other:?}"),
                }
            }
            // The sum of a row overflows, none of its numbers does.
            let large = |x: &mut [f32]| x[WIDTH..2 * WIDTH].fill(1e37);
            let fisher = collect(&large, method).unwrap();
            let row = fisher.gradients.row(1).unwrap();
            assert!(row.iter().all(|x| (x - 1e37).abs() < 1e31), "{method:?}");
        }
    });
}
