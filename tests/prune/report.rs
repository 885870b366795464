//! Operations and reports.

use burn::module::{Module, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_lean::prune::{
    FisherConfig, Masks, PruneError, PruneReport, Selection,
    fisher::GradientMethod,
    flops,
    shrink::{ShrinkReport, ShrunkGroup},
};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    grouped: Conv2d,
    up: ConvTranspose2d,
    embedding: Embedding,
    head: Linear,
    own: Param<Tensor<2>>,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([2, 4], [3, 3])
                .with_stride([2, 2])
                .init(device),
            grouped: Conv2dConfig::new([4, 4], [1, 1])
                .with_groups(2)
                .init(device),
            up: ConvTranspose2dConfig::new([4, 2], [2, 2])
                .with_stride([2, 2])
                .init(device),
            embedding: EmbeddingConfig::new(5, 3).init(device),
            head: LinearConfig::new(3, 2).init(device),
            own: Param::from_tensor(Tensor::ones([2, 6], device)),
        }
    }

    fn loss(&self, batch: &(Tensor<4>, Tensor<2, Int>)) -> Tensor<1> {
        // 7 × 7 to 3 × 3, and up to 6 × 6.
        let x = self
            .up
            .forward(self.grouped.forward(self.conv.forward(batch.0.clone())));
        let y = self.head.forward(self.embedding.forward(batch.1.clone()));
        let z = y
            .flatten::<2>(1, 2)
            .slice_dim(1, 0..2)
            .matmul(self.own.val());
        x.mean() + z.mean()
    }
}

fn batch(device: &Device) -> (Tensor<4>, Tensor<2, Int>) {
    (
        Tensor::zeros([3, 2, 7, 7], device),
        Tensor::zeros([3, 4], device),
    )
}

#[test]
fn every_weight_is_counted_as_often_as_it_is_used() {
    let device = Device::flex();
    let counted = flops(&Net::new(&device), Net::loss, &batch(&device)).unwrap();
    assert_eq!(counted["conv.weight"], 2.0 * 9.0);
    assert_eq!(counted["grouped.weight"], 2.0 * 9.0);
    assert_eq!(counted["up.weight"], 2.0 * 9.0);
    // Four positions in the sequence.
    assert_eq!(counted["head.weight"], 2.0 * 4.0);
    assert_eq!(counted["own"], 2.0);
    // A table that is looked up costs nothing.
    assert_eq!(counted["embedding.weight"], 0.0);
    let net = Net::new(&device);
    let selection = Selection::of(&net, None).unwrap().with_flops(&counted);
    let report = PruneReport::new(&net, &selection).unwrap();
    let table = &report.layers[3];
    assert_eq!(
        (table.path.as_str(), table.dense_flops),
        ("embedding.weight", 0.0)
    );
}

#[test]
fn a_masked_weight_counts_for_its_parameter_and_nothing_is_written_to_the_model() {
    let device = Device::flex();
    let net = Net::new(&device);
    let selection = Selection::of(&net, None).unwrap();
    let net = Masks::from_support(selection.layout(), &[0, 1, 2])
        .unwrap()
        .attach(net)
        .unwrap();
    let counted = flops(&net, Net::loss, &batch(&device)).unwrap();
    assert_eq!(counted["conv.weight"], 2.0 * 9.0);
    let selection = Selection::of(&net, None).unwrap().with_flops(&counted);
    let report = PruneReport::new(&net, &selection).unwrap();
    assert_eq!(report.nonzeros, 3);
    assert_eq!(report.flops, 3.0 * 18.0);
    assert_eq!(report.layers[0].dense_flops, 72.0 * 18.0);
    assert_eq!(report.sparsity(), 1.0 - 3.0 / report.weights as f64);
    assert_says!(report, "conv.weight", "4x2x3x3");
}

#[derive(Module, Debug)]
struct Tied {
    first: Linear,
    again: Linear,
}

/// A weight under two paths is one weight, which is used twice, whichever of them is selected.
#[test]
fn tied_weights_are_counted_once_and_their_operations_twice() {
    let device = Device::flex();
    let first = LinearConfig::new(3, 3).init(&device);
    let net = Tied {
        again: first.clone(),
        first,
    };
    let loss = |net: &Tied, x: &Tensor<2>| net.again.forward(net.first.forward(x.clone())).mean();
    let batch = Tensor::<2>::ones([2, 3], &device);
    let counted = flops(&net, loss, &batch).unwrap();
    for group in [None, Some(ParamGroup::from_path("again.weight"))] {
        let selection = Selection::of(&net, group.as_ref()).unwrap();
        assert_says!(selection, "9 of 12 weights");
        let selection = selection.with_flops(&counted);
        let report = PruneReport::new(&net, &selection).unwrap();
        assert_eq!((report.parameters, report.weights), (12, 9));
        assert_eq!(report.dense_flops, 9.0 * 4.0);
        let text = report.to_string();
        let excluded = "3 of 12 parameters are not pruned (1 tensors)";
        assert_says!(text, excluded);
        let rows = |method| {
            let config = FisherConfig::new(2).with_method(method);
            let fisher = config.collect(&net, &selection, loss, [batch.clone()]);
            let fisher = fisher.unwrap();
            assert_eq!(fisher.report.fallback, None);
            fisher.gradients.row(0).unwrap()
        };
        let (batched, plain) = (rows(GradientMethod::Batched), rows(GradientMethod::Plain));
        assert_near!(batched.iter(), &plain, 1e-6);
    }
}

#[test]
fn a_report_survives_serialization() {
    let device = Device::flex();
    let net = Net::new(&device);
    let report = PruneReport::new(&net, &Selection::of(&net, None).unwrap()).unwrap();
    let json = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<PruneReport>(&json).unwrap(), report);
}

#[test]
fn a_forward_pass_that_reads_numbers_cannot_be_recorded() {
    let device = Device::flex();
    let net = Net::new(&device);
    let reading = flops(
        &net,
        |net: &Net, batch| {
            let loss = net.loss(batch);
            let factor = loss.clone().into_scalar::<f32>();
            loss * factor
        },
        &batch(&device),
    );
    assert_matches!(reading, Err(PruneError::Trace { .. }));
}

#[test]
fn a_report_of_smaller_layers_survives_serialization() {
    let report = ShrinkReport {
        groups: vec![ShrunkGroup {
            paths: vec!["first.weight".into()],
            units: 8,
            removed: 3,
            fixed: None,
        }],
        multiplications_before: 64.0,
        multiplications_after: 40.0,
    };
    let json = serde_json::to_string(&report).unwrap();
    let read: ShrinkReport = serde_json::from_str(&json).unwrap();
    assert_eq!(read, report);
    assert_eq!(read.removed(), 3);
}
