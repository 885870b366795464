//! Which weights share a scale, in layers of which the shape of a weight does not tell.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_lean::quant::{
    Granularity, Override, QatConfig, WeightConfig, WeightGranularity, quantizers,
};

use crate::support::{tensor, values};

/// A matrix for each of three experts.
#[derive(Module, Debug)]
struct Experts {
    stack: Param<Tensor<3>>,
}

impl Experts {
    fn new(shape: [usize; 3], device: &Device) -> Self {
        Self {
            stack: Param::from_tensor(tensor(4, shape, device)),
        }
    }
}

fn in_blocks(size: usize) -> QatConfig {
    let granularity = WeightGranularity::PerBlock { size };
    QatConfig::new().with_weight(WeightConfig::int(4).with_granularity(granularity))
}

fn granularity<M: Module>(model: &M) -> Granularity {
    quantizers(model)[0].quantizer.scheme().granularity.clone()
}

fn blocks(extents: &[usize]) -> Granularity {
    Granularity::PerBlock {
        extents: extents.to_vec(),
    }
}

#[test]
fn blocks_of_a_stack_of_matrices_lie_along_the_inputs_of_each() {
    let device = Device::flex();
    let x = tensor::<3>(5, [3, 4, 6], &device);
    let on_the_right = |model: &Experts, x: Tensor<3>| x.matmul(model.stack.val());
    let model = Experts::new([3, 6, 5], &device);
    let model = in_blocks(2)
        .prepare_for(model, x.clone(), on_the_right)
        .unwrap();
    assert_eq!(granularity(&model), blocks(&[1, 2, 1]));
    // A step of half the largest magnitude divided by 7 for each pair of neighbours.
    let (rounded, stored) = (values(model.stack.val()), values(model.stack.base()));
    for (index, (rounded, stored_value)) in rounded.iter().zip(&stored).enumerate() {
        let (row, column) = (index / 5, index % 5);
        let of_pair = [row / 2 * 2, row / 2 * 2 + 1].map(|row| stored[row * 5 + column].abs());
        let half = of_pair[0].max(of_pair[1]) / 14.0;
        let off = (rounded - stored_value).abs();
        assert!(off <= half * 1.001, "{index}: {off} of {half}");
    }

    let on_the_left = |model: &Experts, x: Tensor<3>| model.stack.val().matmul(x.swap_dims(1, 2));
    let model = Experts::new([3, 5, 6], &device);
    let model = in_blocks(2).prepare_for(model, x, on_the_left).unwrap();
    assert_eq!(granularity(&model), blocks(&[1, 1, 2]));

    // Without a forward pass.
    let named = Override::new("stack".into()).with_axis(Some(2));
    let config = in_blocks(2).with_overrides(vec![named]);
    let model = config.prepare(Experts::new([3, 6, 5], &device)).unwrap();
    assert_eq!(granularity(&model), blocks(&[1, 2, 1]));
}
