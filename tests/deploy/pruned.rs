//! Pruned models in the engine: one call, with masks or after them, and what became of the zeros.

use burn::module::{Module, ModuleMapper, Param, ParamGroup};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, EngineReport, Execution, Export, SparseOutcome};
use burn_lean::prune::Masks;

use crate::judge::close;
use crate::support::{each_device, tensor, with_numbers};

#[derive(Module, Debug)]
struct Net {
    conv: Conv2d,
    body: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let net = Self {
            conv: Conv2dConfig::new([3, 4], [3, 3]).init(device),
            body: LinearConfig::new(4 * 6 * 6, 64).init(device),
            head: LinearConfig::new(64, 10).init(device),
        };
        with_numbers(net, 1)
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<2> {
        let x = relu(self.conv.forward(x)).flatten(1, 3);
        self.head.forward(relu(self.body.forward(x)))
    }
}

/// Keeps `n` of each four numbers along the first axis of a matrix, or the second of a kernel.
struct KeepOfFour(usize);

impl ModuleMapper for KeepOfFour {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D < 2 {
            return param;
        }
        let kept = self.0;
        param.map(|weight| {
            let (device, shape) = (weight.device(), weight.dims());
            let step: usize = shape[1..].iter().product();
            let mut numbers: Vec<f32> = weight.into_data().iter().collect();
            for (index, number) in numbers.iter_mut().enumerate() {
                let place = match D {
                    2 => index / step,
                    _ => index,
                };
                if (place + index % step) % 4 >= kept {
                    *number = 0.0;
                }
            }
            Tensor::from_data(TensorData::new(numbers, shape), &device)
        })
    }
}

fn compiled<M: Module>(
    config: &EngineConfig,
    model: &M,
    x: &Tensor<4>,
    forward: impl Fn(&M, Tensor<4>) -> Tensor<2>,
) -> (Tensor<2>, EngineReport) {
    let export = Export::record(model, x, forward).unwrap();
    let engine = config.compile(export).unwrap();
    (engine.run(x).unwrap(), engine.report())
}

#[test]
fn a_model_with_masks_runs_without_its_zeros_or_says_of_each_layer_why_not() {
    each_device(|target| {
        for kept in [1, 2] {
            let pruned = Net::new(&target.device).map(&mut KeepOfFour(kept));
            // As training leaves it: what is behind the masks is no zero.
            let masks = Masks::from_zeros(&pruned, &ParamGroup::all()).unwrap();
            let masked = masks.attach(Net::new(&target.device)).unwrap();
            let x = tensor::<4>(2, [3, 3, 8, 8], &target.device);
            let expected = pruned.forward(x.clone());
            let (found, report) = compiled(&EngineConfig::new(), &masked, &x, Net::forward);
            close(found, expected);
            let of = |path: &str| {
                let found = report.sparse.iter().find(|layer| layer.path == path);
                found.unwrap_or_else(|| panic!("{path} is not in {report}"))
            };
            let body = of("body.weight");
            assert_eq!(
                (body.nonzeros, body.weights),
                (144 * 64 * kept / 4, 144 * 64)
            );
            assert_eq!(of("head.weight").weights, 640);
            assert_matches!(of("conv.weight").outcome, SparseOutcome::NoProduct { .. });
            for layer in &report.layers {
                let left_out = of(&layer.path).is_left_out();
                assert_eq!(left_out, layer.execution == Execution::Sparse, "{report}");
            }
        }
    });
}

#[test]
fn a_matrix_without_its_zeros_keeps_the_others_and_their_places() {
    let device = Device::flex();
    let mut linear: Linear = with_numbers(LinearConfig::new(256, 128).init(&device), 3);
    linear.weight = linear.weight.map(|weight| {
        let keep = weight.clone().greater_elem(0.1).float();
        weight * keep
    });
    let nonzeros = linear.weight.val().not_equal_elem(0.0).int().sum();
    let nonzeros = nonzeros.into_scalar::<i64>() as usize;
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    for rows in [1, 3, 33] {
        let x = tensor::<4>(4, [rows, 1, 1, 256], &device);
        let forward = |linear: &Linear, x: Tensor<4>| linear.forward(x.flatten::<2>(1, 3));
        let (found, report) = compiled(&own, &linear, &x, forward);
        close(found, forward(&linear, x));
        assert_eq!(report.sparse.len(), usize::from(2 * nonzeros <= 256 * 128));
        let weight = match report.sparse[0].outcome {
            SparseOutcome::LeftOut { sparse, dense } => {
                assert!(sparse <= dense);
                6 * nonzeros + 4 * 129
            }
            SparseOutcome::Multiplied { sparse, dense } => {
                assert!(sparse > dense);
                4 * 256 * 128
            }
            _ => 4 * 256 * 128,
        };
        assert_eq!(report.resident_bytes, weight + 4 * 128, "{report}");
    }
}

#[test]
fn what_is_no_number_stays_none_without_zeros() {
    let device = Device::flex();
    let mut linear: Linear = LinearConfig::new(512, 512).init(&device);
    // So few that leaving the others out is faster.
    let numbers = (0..512 * 512).map(|at| f32::from(u8::from(at % 97 == 0)));
    let numbers = TensorData::new(numbers.collect::<Vec<f32>>(), [512, 512]);
    linear.weight = Param::from_data(numbers, &device);
    let mut given = vec![0.5_f32; 3 * 512];
    given[512 + 7] = f32::NAN;
    given[2 * 512 + 9] = f32::INFINITY;
    let given = Tensor::<2>::from_data(TensorData::new(given, [3, 512]), &device);
    let forward = |linear: &Linear, x: Tensor<2>| linear.forward(x);
    let x = tensor::<2>(4, [3, 512], &device);
    let export = Export::record(&linear, &x, forward).unwrap();
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let engine = own.compile(export).unwrap();
    let found = engine.run(&given).unwrap();
    close(found, forward(&linear, given));
}

#[derive(Module, Debug)]
struct Tied {
    embedding: Embedding,
}

#[test]
fn a_weight_that_is_read_in_two_ways_is_reported_by_its_path() {
    let device = Device::flex();
    let model = Tied {
        embedding: EmbeddingConfig::new(256, 64).init(&device),
    };
    let model = with_numbers(model, 5).map(&mut KeepOfFour(1));
    let forward = |model: &Tied, tokens: Tensor<2, Int>| {
        let x = model.embedding.forward(tokens);
        x.matmul(model.embedding.weight.val().transpose().unsqueeze())
    };
    let tokens = Tensor::<2, Int>::from_ints([[3, 255, 0], [7, 7, 128]], &device);
    let export = Export::record(&model, &tokens, forward).unwrap();
    let own = EngineConfig::new().with_backend(Some(Backend::Own));
    let engine = own.compile(export).unwrap();
    close(engine.run(&tokens).unwrap(), forward(&model, tokens));
    let report = engine.report();
    assert_eq!(report.sparse.len(), 1, "{report}");
    assert_eq!(report.sparse[0].path, "embedding.weight");
    let left_out = report.sparse[0].is_left_out();
    let layer = &report.layers[0];
    assert_eq!(layer.path, "embedding.weight");
    assert_eq!(left_out, layer.execution == Execution::Sparse, "{report}");
}

#[test]
fn a_dense_model_has_nothing_to_leave_out() {
    let device = Device::flex();
    let net = Net::new(&device);
    let x = tensor::<4>(2, [3, 3, 8, 8], &device);
    let (found, report) = compiled(&EngineConfig::new(), &net, &x, Net::forward);
    close(found, net.forward(x));
    assert_eq!(report.sparse, []);
    let three_of_four = Net::new(&device).map(&mut KeepOfFour(3));
    let x = tensor::<4>(2, [1, 3, 8, 8], &device);
    let (_, report) = compiled(&EngineConfig::new(), &three_of_four, &x, Net::forward);
    assert_eq!(report.sparse, []);
}
