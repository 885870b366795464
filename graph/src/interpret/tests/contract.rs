//! What an execution makes by itself, and what it refuses. What Burn does not record is written by
//! hand here.

use burn::backend::ir::{
    BaseOperationIr, BinaryOpIr, CastOpIr, CreationOpIr, CtcLossOpIr, CustomOpIr, DequantizeOpIr,
    DistributedOperationIr, FloatOperationIr, LinearBiasBackwardOpIr, LinearOpIr,
    LinearWeightBackwardOpIr, LinearXBackwardOpIr, ModuleOperationIr, NumericOperationIr,
    OperationIr, QuantizationParametersIr, QuantizeOpIr, RandomOpIr, ReduceDimsOpIr, ScatterNdOpIr,
    TensorId, TensorIr, UnaryOpIr,
};
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps, ModuleOps, QTensorOps};
use burn::backend::quantization::QuantizationParametersPrimitive;
use burn::backend::{Dispatch, DispatchTensor, Shape, TensorMetadata};
use burn::tensor::{
    BoolDType, DType, Device, Distribution, FloatDType, IndexingUpdateOp, IntDType, TensorData,
};

use super::super::{Unsupported, run};
use super::{CAPTURE, Map, Recording, bools, floats, floats_in, read, upload};

fn declared<const D: usize>(id: u64, shape: [usize; D], dtype: DType) -> TensorIr {
    TensorIr::uninit(TensorId::new(id), Shape::new(shape), dtype)
}

/// Gives a map tensors, and their declarations.
fn given<const N: usize>(map: &mut Map, tensors: [&DispatchTensor; N]) -> [TensorIr; N] {
    let mut next = 1000;
    tensors.map(|tensor| {
        next += 1;
        map.alive.insert(TensorId::new(next), tensor.clone());
        TensorIr::uninit(TensorId::new(next), tensor.shape(), tensor.dtype())
    })
}

#[test]
fn bools_are_stored_as_the_device_does_however_they_were_recorded() {
    // As Burn configures it: bools of one byte, ints of 64 bits.
    let capture = Device::capture();
    let inputs = [floats([4, 3])];
    let recording = Recording::new(&capture, &inputs, |[x]| {
        let (device, shape) = (x.device(), Shape::new([4, 3]));
        let greater = Dispatch::float_greater_elem(x.clone(), 0.3f64.into(), BoolDType::U8);
        let lower = Dispatch::float_lower_elem(x, 0.9f64.into(), BoolDType::U8);
        let both = Dispatch::bool_and(greater.clone(), lower);
        let ones = Dispatch::bool_ones(shape.clone(), &device, BoolDType::U8);
        let zeros = Dispatch::bool_zeros(shape.clone(), &device, BoolDType::U8);
        let empty = Dispatch::bool_empty(shape, &device, BoolDType::U8);
        vec![greater, both, ones, zeros, empty]
    });
    let flex = Device::flex();
    let on_flex = inputs.map(|data| upload(data, &flex));
    let got = recording.execute(&mut Map::new(&flex), on_flex.to_vec());
    for tensor in &got {
        assert_eq!(tensor.dtype(), DType::from(flex.settings().bool_dtype));
    }
    let [x] = on_flex;
    let native = flex.settings().bool_dtype;
    let greater = Dispatch::float_greater_elem(x.clone(), 0.3f64.into(), native);
    let lower = Dispatch::float_lower_elem(x, 0.9f64.into(), native);
    let want = Dispatch::bool_and(greater, lower);
    assert_eq!(read(got[1].clone()), read(want));
    assert_eq!(read(got[2].clone()), TensorData::from([[true; 3]; 4]));
    assert_eq!(read(got[3].clone()), TensorData::from([[false; 3]; 4]));
}

#[test]
fn ints_are_made_in_the_dtype_that_was_recorded() {
    let recording = CAPTURE.with(|capture| {
        Recording::new(capture, &[floats([4, 3])], |[x]| {
            let (device, shape) = (x.device(), Shape::new([2, 2]));
            vec![
                Dispatch::int_zeros(shape.clone(), &device, IntDType::I64),
                Dispatch::int_ones(shape.clone(), &device, IntDType::I32),
                Dispatch::int_empty(shape.clone(), &device, IntDType::U8),
                Dispatch::int_random(
                    shape,
                    Distribution::Uniform(2.0, 3.0),
                    &device,
                    IntDType::I64,
                ),
            ]
        })
    });
    let flex = Device::flex();
    let got = recording.execute(&mut Map::new(&flex), vec![upload(floats([4, 3]), &flex)]);
    let dtypes: Vec<_> = got.iter().map(TensorMetadata::dtype).collect();
    assert_eq!(dtypes, [DType::I64, DType::I32, DType::U8, DType::I64]);
    assert_eq!(read(got[0].clone()), TensorData::from([[0i64; 2]; 2]));
    assert_eq!(read(got[1].clone()), TensorData::from([[1i32; 2]; 2]));
    assert!(
        read(got[3].clone())
            .iter::<i64>()
            .all(|value| (2..=3).contains(&value))
    );
}

#[test]
fn noise_is_fresh_in_each_execution() {
    let recording = CAPTURE.with(|capture| {
        Recording::new(capture, &[floats([1])], |[x]| {
            let (device, shape) = (x.device(), Shape::new([50, 2]));
            let uniform = Distribution::Uniform(0.25, 0.75);
            let noise = Dispatch::float_random(shape.clone(), uniform, &device, FloatDType::F32);
            let empty = Dispatch::float_empty(shape, &device, FloatDType::F32);
            vec![noise, empty]
        })
    });
    let flex = Device::flex();
    let noise = || {
        let x = upload(floats([1]), &flex);
        read(recording.execute(&mut Map::new(&flex), vec![x]).remove(0))
    };
    let (first, second) = (noise(), noise());
    assert_ne!(first, second);
    assert!(
        first
            .iter::<f32>()
            .all(|value| (0.25..=0.75).contains(&value))
    );
    assert_eq!(first.shape(), &Shape::new([50, 2]));
}

/// Computes `operation` of given tensors, and returns what it makes.
fn by_hand<const N: usize>(
    tensors: [TensorData; N],
    out: TensorIr,
    operation: impl Fn([TensorIr; N], TensorIr) -> OperationIr,
) -> (DispatchTensor, [DispatchTensor; N]) {
    let flex = Device::flex();
    let mut map = Map::new(&flex);
    let tensors = tensors.map(|data| upload(data, &flex));
    let inputs = given(&mut map, tensors.each_ref());
    map.run(&operation(inputs, out.clone()));
    (map.alive[&out.id].clone(), tensors)
}

#[test]
fn linear_layers_that_burn_records_as_products() {
    let out = declared(1, [2, 4, 5], DType::F32);
    let inputs = || [floats([2, 4, 3]), floats([3, 5]), floats([5])];
    let (got, [x, weight, bias]) = by_hand(inputs(), out.clone(), |[x, weight, bias], out| {
        let op = LinearOpIr {
            x,
            weight,
            bias: Some(bias),
            out,
        };
        OperationIr::Module(ModuleOperationIr::Linear(op))
    });
    assert_eq!(read(got), read(Dispatch::linear(x, weight, Some(bias))));
    let (got, [x, weight, _]) = by_hand(inputs(), out.clone(), |[x, weight, _], out| {
        let op = LinearOpIr {
            x,
            weight,
            bias: None,
            out,
        };
        OperationIr::Module(ModuleOperationIr::Linear(op))
    });
    assert_eq!(read(got), read(Dispatch::linear(x, weight, None)));

    let inputs = [floats([3, 5]), floats([2, 4, 5])];
    let out = declared(1, [2, 4, 3], DType::F32);
    let (got, [weight, grad]) = by_hand(inputs, out, |[weight, output_grad], out| {
        let op = LinearXBackwardOpIr {
            weight,
            output_grad,
            out,
        };
        OperationIr::Module(ModuleOperationIr::LinearXBackward(op))
    });
    assert_eq!(read(got), read(Dispatch::linear_x_backward(weight, grad)));
    let inputs = [floats([2, 4, 3]), floats([2, 4, 5])];
    let out = declared(1, [3, 5], DType::F32);
    let (got, [x, grad]) = by_hand(inputs, out, |[x, output_grad], out| {
        let op = LinearWeightBackwardOpIr {
            x,
            output_grad,
            out,
        };
        OperationIr::Module(ModuleOperationIr::LinearWeightBackward(op))
    });
    assert_eq!(read(got), read(Dispatch::linear_weight_backward(x, grad)));
    let out = declared(1, [5], DType::F32);
    let (got, [grad]) = by_hand([floats([2, 4, 5])], out, |[output_grad], out| {
        let op = LinearBiasBackwardOpIr { output_grad, out };
        OperationIr::Module(ModuleOperationIr::LinearBiasBackward(op))
    });
    assert_eq!(read(got), read(Dispatch::linear_bias_backward(grad)));
}

#[test]
fn what_burn_decomposes_or_refuses_to_record() {
    let flex = Device::flex().settings();
    let bools_out = declared(1, [3], DType::from(flex.bool_dtype));
    let special = || [TensorData::from([f32::NAN, 1.0, f32::NEG_INFINITY])];
    let (got, _) = by_hand(special(), bools_out.clone(), |[input], out| {
        OperationIr::Float(
            DType::F32,
            FloatOperationIr::IsNan(UnaryOpIr { input, out }),
        )
    });
    assert_eq!(read(got), TensorData::from([true, false, false]));
    let (got, _) = by_hand(special(), bools_out, |[input], out| {
        OperationIr::Float(
            DType::F32,
            FloatOperationIr::IsInf(UnaryOpIr { input, out }),
        )
    });
    assert_eq!(read(got), TensorData::from([false, false, true]));

    let inputs = [
        TensorData::from([2.0f32, -3.0, 0.5]),
        TensorData::from([3i32, 2, -1]),
    ];
    let (got, _) = by_hand(inputs, declared(1, [3], DType::F32), |[lhs, rhs], out| {
        let op = BinaryOpIr { lhs, rhs, out };
        OperationIr::NumericFloat(DType::F32, NumericOperationIr::Powi(op))
    });
    assert_eq!(read(got), TensorData::from([8.0f32, 9.0, 2.0]));

    let log_probs = floats_in([5, 2, 4], -3.0, -0.5);
    let labels = TensorData::from([[1i32, 2], [3, 1]]);
    let inputs = [
        log_probs,
        labels,
        TensorData::from([5i32, 4]),
        TensorData::from([2i32, 1]),
    ];
    let out = declared(1, [2], DType::F32);
    let (got, [log_probs, labels, steps, lengths]) = by_hand(inputs, out, |inputs, out| {
        let [log_probs, targets, input_lengths, target_lengths] = inputs;
        OperationIr::Module(ModuleOperationIr::CtcLoss(CtcLossOpIr {
            log_probs,
            targets,
            input_lengths,
            target_lengths,
            blank: 0,
            out,
        }))
    });
    assert_eq!(
        read(got),
        read(Dispatch::ctc_loss(log_probs, labels, steps, lengths, 0))
    );

    let inputs = [TensorData::from([[1i32, 2], [3, 4]])];
    let (got, _) = by_hand(inputs, declared(1, [1, 1], DType::I32), |[input], out| {
        let op = ReduceDimsOpIr {
            input,
            out,
            axes: vec![0, 1],
        };
        OperationIr::NumericInt(DType::I32, NumericOperationIr::SumDims(op))
    });
    assert_eq!(read(got), TensorData::from([[10i32]]));

    let out = declared(1, [4, 3], DType::from(BoolDType::U8));
    let (got, [mask]) = by_hand([bools([4, 3])], out, |[input], out| {
        OperationIr::BaseBool(BaseOperationIr::Cast(CastOpIr { input, out }))
    });
    assert_eq!(read(got), read(mask));
}

#[test]
fn quantized_tensors_are_made_and_read() {
    let flex = Device::flex();
    let scheme = flex.settings().quantization.scheme;
    let mut map = Map::new(&flex);
    let tensor = upload(floats_in([4, 32], -1.0, 1.0), &flex);
    let scales = upload(TensorData::from([0.0078f32]), &flex);
    let [tensor_ir, scales_ir] = given(&mut map, [&tensor, &scales]);
    let quantized = declared(1, [4, 32], DType::QFloat(scheme));
    let out = declared(2, [4, 32], DType::F32);
    let qparams = QuantizationParametersIr {
        scales: scales_ir,
        global: None,
    };
    let quantize = QuantizeOpIr {
        tensor: tensor_ir,
        qparams,
        scheme,
        out: quantized.clone(),
    };
    let dequantize = DequantizeOpIr {
        input: quantized,
        out,
    };
    for op in [
        FloatOperationIr::Quantize(quantize),
        FloatOperationIr::Dequantize(dequantize),
    ] {
        map.run(&OperationIr::Float(DType::F32, op));
    }
    let qparams = QuantizationParametersPrimitive {
        scales,
        global: None,
    };
    let want = Dispatch::dequantize(
        Dispatch::quantize(tensor, &scheme, qparams),
        FloatDType::F32,
    );
    assert_eq!(read(map.alive[&TensorId::new(2)].clone()), read(want));
}

#[test]
fn what_cannot_be_executed_is_refused_with_its_name() {
    let mut map = Map::new(&Device::flex());
    let mut refused = |operation: OperationIr| match run(&operation, &mut map) {
        Err(Unsupported { name, why }) => {
            assert!(!why.is_empty());
            name
        }
        Ok(()) => panic!("it was executed"),
    };
    let [data, indices, values, out] = [1, 2, 3, 4].map(|id| declared(id, [1], DType::F32));
    assert_eq!(
        refused(OperationIr::Custom(CustomOpIr::new("mine", &[], &[]))),
        "custom"
    );
    let sync = DistributedOperationIr::SyncCollective;
    assert_eq!(refused(OperationIr::Distributed(sync)), "sync_collective");
    let reduction = IndexingUpdateOp::Add;
    let scatter = ScatterNdOpIr {
        data,
        indices,
        values,
        reduction,
        out: out.clone(),
    };
    let scatter = BaseOperationIr::ScatterNd(scatter);
    assert_eq!(refused(OperationIr::BaseBool(scatter)), "scatter_nd");
    let random = RandomOpIr {
        out: out.clone(),
        distribution: Distribution::Default,
    };
    let random = NumericOperationIr::IntRandom(random);
    assert_eq!(
        refused(OperationIr::NumericFloat(DType::F32, random)),
        "random"
    );
    // Only that; the same creation is fine for its own kind.
    let zeros = OperationIr::BaseFloat(BaseOperationIr::Zeros(CreationOpIr { out: out.clone() }));
    assert_eq!(run(&zeros, &mut map), Ok(()));
    assert_eq!(map.stored, [out.id]);
}
