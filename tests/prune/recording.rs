//! Recording a loss: with as few devices as possible, and without a word.

use std::process::Command;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Tensor};
use burn_lean::prune::{FisherConfig, PruneError, Selection, flops};

use crate::support::tensor;

/// The number of a new capture device: how many a process has had, as Burn counts them.
fn devices_so_far() -> usize {
    let device = format!("{:?}", Device::capture());
    let digits = device
        .split(|c: char| !c.is_ascii_digit())
        .rfind(|part| !part.is_empty());
    digits.unwrap().parse().unwrap()
}

/// Burn has 65,536 of them for a process.
#[test]
fn a_recording_uses_no_capture_device_up() {
    let linear = LinearConfig::new(2, 2).init(&Device::flex());
    let x = Tensor::<2>::zeros([1, 2], &Device::flex());
    let before = devices_so_far();
    for _ in 0..300 {
        let loss = |model: &Linear, x: &Tensor<2>| model.forward(x.clone()).mean();
        assert_eq!(flops(&linear, loss, &x).unwrap()["weight"], 2.0);
    }
    // Other tests record at the same time, each on a device of its own.
    assert!(devices_so_far() - before < 200);
}

fn reads_a_number(model: &Linear, x: &Tensor<2>) -> Tensor<1> {
    let y = model.forward(x.clone()).mean();
    let scale = y.clone().into_scalar::<f32>().abs() + 1.0;
    y / scale
}

#[test]
fn a_loss_that_reads_a_number_says_where_and_prints_nothing() {
    const CHILD: &str = "RECORDS_A_LOSS_THAT_READS_A_NUMBER";
    let device = Device::flex();
    let linear = LinearConfig::new(3, 2).init(&device);
    let x = tensor::<2>(1, [4, 3], &device);
    if std::env::var_os(CHILD).is_some() {
        let selection = Selection::of(&linear, None).unwrap();
        let fisher = FisherConfig::new(4).collect(&linear, &selection, reads_a_number, [x.clone()]);
        assert!(fisher.unwrap().report.fallback.is_some());
        return;
    }
    let Err(PruneError::Trace { reason }) = flops(&linear, reads_a_number, &x) else {
        panic!("it cannot be recorded");
    };
    assert_says!(reason, " (at ");
    // The test itself, in a process of its own, whose standard error can be looked at.
    let name = "recording::a_loss_that_reads_a_number_says_where_and_prints_nothing";
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{text}");
    assert!(!text.contains("panicked"), "{text}");
}

/// A weight that is changed before it is multiplied is counted; one that is added is not, whatever it is
/// added to.
#[test]
fn what_is_added_to_an_input_multiplies_nothing() {
    #[derive(Module, Debug)]
    struct Net {
        positions: Param<Tensor<2>>,
        first: Linear,
    }
    let device = Device::flex();
    let net = Net {
        positions: Param::from_tensor(tensor::<2>(2, [4, 8], &device)),
        first: LinearConfig::new(8, 3).init(&device),
    };
    let x = tensor::<2>(1, [4, 8], &device);
    let loss = |net: &Net, x: &Tensor<2>| {
        let x = x.clone() + net.positions.val();
        let scaled = (net.first.weight.val() * 2.0).transpose().transpose();
        (net.first.forward(x.clone()) + x.matmul(scaled)).mean()
    };
    let counted = flops(&net, loss, &x).unwrap();
    // Two products, a multiplication and an addition each.
    assert_eq!(counted["first.weight"], 4.0);
    assert_eq!(counted["positions"], 0.0);
    assert_eq!(counted["first.bias"], 0.0);
}
