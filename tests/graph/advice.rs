//! What is said of a forward pass that cannot be recorded fits why it cannot.

use burn::nn::loss::CTCLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::quantization::QuantScheme;
use burn::tensor::{Device, Int, Tensor};
use burn_lean::graph::{GraphError, Tensors, record};

use crate::support::{tensor, values};

/// Of a closure over labels of two examples.
fn refused<O: Tensors>(forward: impl FnOnce(&Linear, Tensor<1, Int>) -> O) -> GraphError {
    let device = Device::flex();
    let model = LinearConfig::new(3, 3).init(&device);
    let labels = Tensor::<1, Int>::from_ints([2, 0], &device);
    match record(&model, &labels, forward) {
        Ok(_) => panic!("it was recorded"),
        Err(error) => error,
    }
}

#[test]
fn a_shape_that_does_not_fit_is_not_taken_for_a_value_that_is_missing() {
    let reshaped = refused(|_, labels| labels.reshape([1, 3]));
    let multiplied = refused(|model, labels| model.forward(labels.float().unsqueeze::<2>()));
    for error in [reshaped, multiplied] {
        assert_says!(error, "It would not run without a recording either");
        assert!(!error.to_string().contains("one_hot"), "{error}");
        assert!(!error.is_of_recording());
    }
}

#[test]
fn one_hot_is_named_where_it_reads_labels() {
    let errors = [
        refused(|_, labels| labels.one_hot::<2>(3)),
        refused(|_, labels| labels.one_hot_fill::<2>(3, 5.0, 0.0, -1)),
    ];
    for error in errors {
        assert_says!(error, "`one_hot`", "equal(classes)");
        assert!(error.is_of_recording());
    }
    // Another value that is read, and what is no missing value.
    let read = refused(|_, labels| labels.sum().into_scalar::<i64>().to_string());
    assert_says!(read, "read values");
    assert!(!read.to_string().contains("one_hot") && read.is_of_recording());
    let sorted = refused(|_, labels| labels.sort(1));
    assert!(!sorted.to_string().contains("one_hot"), "{sorted}");
}

/// It runs without a recording.
#[test]
fn an_operation_that_burn_does_not_record_is_not_said_to_fail_anyway() {
    let quantize = |x: Tensor<1>| x.quantize_dynamic(&QuantScheme::default()).dequantize();
    let x = tensor::<1>(1, [8], &Device::flex());
    let quantized = values(quantize(x.clone()));
    assert_near!(quantized.into_iter(), values(x), 0.01);
    let error = refused(|_, labels| quantize(labels.float()));
    assert_says!(error, "Burn does not record", "`quantize_dynamic`");
    assert!(
        !error.to_string().contains("without a recording"),
        "{error}"
    );
    assert!(error.is_of_recording());
}

/// Burn's module compares shapes in every build, and lengths in one with debug assertions.
#[test]
fn targets_of_another_batch_are_not_taken_for_lengths_that_are_missing() {
    let device = Device::flex();
    let loss = CTCLossConfig::new().init();
    let log_probabilities = tensor::<3>(1, [5, 2, 4], &device);
    let recorded = |batch: usize| {
        let targets = Tensor::<2, Int>::ones([batch, 1], &device);
        let lengths = |length: i64| Tensor::<1, Int>::from_ints([length, length], &device);
        let input = (log_probabilities.clone(), targets, lengths(5), lengths(1));
        let recording = record(&loss, &input, |loss, (x, targets, of_x, of_targets)| {
            loss.forward(x, targets, of_x, of_targets)
        });
        recording.map(|_| ())
    };
    let error = recorded(3).unwrap_err();
    assert_says!(error, "It would not run without a recording either");
    assert!(!error.to_string().contains("--release"), "{error}");
    match recorded(2) {
        Ok(()) if !cfg!(debug_assertions) => {}
        Err(error) if cfg!(debug_assertions) => {
            assert_says!(error, "--release");
            assert!(error.is_of_recording());
        }
        other => panic!("{other:?}"),
    }
}

/// Whether there is a way without one depends on who records.
#[test]
fn an_error_of_a_recording_leaves_it_to_its_caller_to_do_without() {
    let why = || "it is not there".to_string();
    let of_recording = [
        GraphError::ForeignOutput { index: 0 },
        GraphError::RunningState {
            path: "norm".into(),
            reason: why(),
        },
        GraphError::Operation {
            operation: "custom",
            module: "`layer`".into(),
            why: why(),
        },
        GraphError::StopsGradients {
            parameter: "weight".into(),
            error: 0.5,
        },
    ];
    for error in of_recording {
        assert!(error.is_of_recording(), "{error}");
        assert!(!error.to_string().contains("without recording"), "{error}");
    }
    let others = [
        GraphError::NoDevice,
        GraphError::Training,
        GraphError::Device { reason: why() },
        GraphError::Panics {
            operation: "gather",
            module: "`layer`".into(),
            reason: why(),
        },
    ];
    for error in others {
        assert!(!error.is_of_recording(), "{error}");
    }
}
