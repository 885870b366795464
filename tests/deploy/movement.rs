//! How elements are moved and chosen.

use burn::tensor::ops::PadMode;
use burn::tensor::{Device, IndexingUpdateOp, Int, IntDType, Tensor, s};
use burn_lean::deploy::{Export, Form, OnnxNode};

use crate::judge::{Nothing, same};
use crate::support::{each_device, tensor};

#[test]
fn shapes_axes_and_slices() {
    each_device(|target| {
        let x = tensor::<3>(1, [2, 3, 4], &target.device);
        same(&Nothing {}, x.clone(), |_, x| {
            let y = x
                .clone()
                .swap_dims(1, 2)
                .reshape([2, 12])
                .unsqueeze_dim::<3>(1);
            let z = x
                .clone()
                .permute([0, 2, 1])
                .flatten::<2>(1, 2)
                .unsqueeze_dim::<3>(1);
            Tensor::cat(vec![y, z], 1)
        });
        same(&Nothing {}, x.clone(), |_, x| {
            let a = x.clone().slice(s![.., 1..3, ..-1]);
            let b = x.clone().slice(s![.., 0..2, 1..]);
            let c = x
                .clone()
                .slice(s![.., ..;-2, ..;2])
                .repeat_dim(2, 2)
                .slice(s![.., .., 0..3]);
            a + b + c + x.flip([1]).slice(s![.., 0..2, 0..3])
        });
        same(&Nothing {}, x, |_, x| {
            let value = x.clone().slice(s![.., 0..1, 0..2]) * 10.0;
            let wide = x.clone().slice_assign(s![.., 1..2, 1..3], value);
            wide + x.clone().slice(s![.., 0..1, ..]).expand([2, 3, 4])
        });
    });
}

/// A 0 without the attribute is the size of the axis of the input: here 4.
#[test]
fn an_axis_of_no_size_is_not_the_one_that_was_there() {
    let device = Device::flex();
    for (shape, expected) in [([4, 0], true), ([4, 3], false)] {
        let x = Tensor::<2>::zeros(shape, &device);
        let forward = |_: &Nothing, x: Tensor<2>| x.flatten::<1>(0, 1);
        let export = Export::record(&Nothing {}, &x, forward).unwrap();
        let model = export.to_onnx(Form::Float).unwrap().model;
        let reshape = model
            .nodes()
            .iter()
            .find(|node| node.operator() == "Reshape");
        assert!(reshape.is_some());
        let bytes = model.to_bytes().unwrap();
        let found = bytes.windows(9).any(|text| text == b"allowzero");
        assert_eq!(found, expected, "{shape:?}");
    }
}

#[test]
fn choosing_by_indices() {
    each_device(|target| {
        let x = tensor::<2>(2, [3, 4], &target.device);
        let rows = Tensor::<1, Int>::from_ints([2, 0, 1, 2], &target.device);
        let at = Tensor::<2, Int>::from_ints([[3, 0], [1, 1], [0, 2]], &target.device);
        same(&Nothing {}, (x.clone(), rows.clone()), |_, (x, rows)| {
            x.select(0, rows)
        });
        // Messages to nodes, of which one gets two.
        same(&Nothing {}, (x.clone(), rows.clone()), |_, (x, rows)| {
            let messages = x.clone().select(0, rows.clone());
            x.select_assign(0, rows, messages, IndexingUpdateOp::Add)
        });
        // WGSL has no bytes, and Burn indexes with none on a GPU.
        if !target.is_gpu() {
            let rows = rows.clone().cast(IntDType::U8);
            same(&Nothing {}, (x.clone(), rows), |_, (x, rows)| {
                x.select(0, rows)
            });
        }
        same(&Nothing {}, (x, at), |_, (x, at)| {
            let found = x.clone().gather(1, at.clone());
            x.scatter(1, at, found, IndexingUpdateOp::Add)
        });
    });
}

/// ONNX's operators for several numbers at a time take no others.
#[test]
fn elements_that_several_numbers_choose_are_chosen_by_64_bits() {
    let device = Device::flex();
    let x = tensor::<2>(2, [3, 4], &device);
    let at = Tensor::<2, Int>::from_ints([[2, 0], [1, 3], [0, 1]], &device).cast(IntDType::I32);
    let exported = same(&Nothing {}, (x, at), |_, (x, at)| {
        let found: Tensor<1> = x.clone().gather_nd(at.clone());
        x.scatter_nd(at, found * 2.0, IndexingUpdateOp::Add)
    });
    let nodes = exported.model.nodes();
    let makers = |name: &String| {
        let maker = nodes.iter().find(|node| node.outputs().contains(name));
        maker.map(OnnxNode::operator)
    };
    for operator in ["GatherND", "ScatterND"] {
        let node = nodes.iter().find(|node| node.operator() == operator);
        assert_eq!(makers(&node.unwrap().inputs()[1]), Some("Cast"));
    }
}

#[test]
fn padding_and_triangles() {
    each_device(|target| {
        let x = tensor::<2>(3, [4, 4], &target.device);
        same(&Nothing {}, x.clone(), |_, x| {
            x.pad((1, 2, 0, 1), PadMode::Constant(0.5))
        });
        same(&Nothing {}, x.clone(), |_, x| {
            x.pad((1, 2, 2, 1), PadMode::Reflect)
        });
        same(&Nothing {}, x, |_, x| x.clone().tril(0) + x.triu(1) * 2.0);
    });
}
