//! Sums of many terms: of a convolution, over channels forward and over all positions backward; of a window;
//! of what an interpolation has spread; of the gradients of all uses of a weight.

use burn::module::{Initializer, Module, Param, ParamId};
use burn::nn::LinearConfig;
use burn::tensor::module::{
    adaptive_avg_pool2d, avg_pool2d, conv_transpose2d, conv1d, conv2d, interpolate,
};
use burn::tensor::ops::{
    AvgPoolOptions, ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions,
};
use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use burn_lean::amp::{Autocast, self_test, supported_dtypes};

use crate::support::{each_device, values};

/// An image that trains, too, a kernel and a bias.
#[derive(Module, Debug)]
struct Convolution {
    image: Param<Tensor<4>>,
    kernel: Param<Tensor<4>>,
    bias: Param<Tensor<1>>,
}

type Forward = fn(&Convolution) -> Tensor<4>;

struct Case {
    name: &'static str,
    image: [usize; 4],
    kernel: [usize; 4],
    bias: usize,
    forward: Forward,
}

fn case(
    name: &'static str,
    image: [usize; 4],
    kernel: [usize; 4],
    bias: usize,
    forward: Forward,
) -> Case {
    Case {
        name,
        image,
        kernel,
        bias,
        forward,
    }
}

fn cases() -> Vec<Case> {
    vec![
        case("conv2d", [16, 3, 32, 32], [4, 3, 3, 3], 4, |model| {
            planar(model, 1)
        }),
        case(
            "conv2d over many channels",
            [1, 2048, 3, 3],
            [2, 2048, 3, 3],
            2,
            |model| planar(model, 1),
        ),
        case(
            "conv2d in groups",
            [8, 4, 32, 32],
            [8, 1, 3, 3],
            8,
            |model| planar(model, 4),
        ),
        case("conv1d", [8, 2, 2048, 1], [3, 2, 5, 1], 3, |model| {
            let [image, kernel] = [&model.image, &model.kernel];
            let (image, kernel) = (image.val().squeeze_dim::<3>(3), kernel.val().squeeze_dim(3));
            let options = ConvOptions::new([1], [2], [1], 1);
            conv1d(image, kernel, Some(model.bias.val()), options).unsqueeze_dim(3)
        }),
        case(
            "avg_pool2d",
            [1, 1, 64, 64],
            [1, 1, 64, 64],
            1,
            // Products are in half; their sum has no place in F16, their mean does.
            |model| {
                let products = model.image.val().matmul(model.kernel.val()) * 1000.0;
                avg_pool2d(products, AvgPoolOptions::new([64, 64])) + model.bias.val().unsqueeze()
            },
        ),
        case(
            "adaptive_avg_pool2d",
            [2, 3, 48, 48],
            [1, 1, 48, 48],
            1,
            |model| {
                let products = model.image.val().matmul(model.kernel.val()) * 1000.0;
                adaptive_avg_pool2d(products, [1, 1]) + model.bias.val().unsqueeze()
            },
        ),
        case("interpolate", [1, 1, 2, 2], [1, 1, 2, 2], 1, |model| {
            let products = model.image.val().matmul(model.kernel.val());
            let nearest = InterpolateOptions::new(InterpolateMode::Nearest);
            let large = interpolate(products, nearest.with_output_size([128, 128]));
            large + model.bias.val().unsqueeze()
        }),
        case("matmul", [1, 2, 8192, 16], [1, 1, 16, 4], 4, |model| {
            let y = model.image.val().matmul(model.kernel.val());
            y + model.bias.val().unsqueeze()
        }),
        case(
            "conv_transpose2d",
            [8, 3, 32, 32],
            [3, 4, 2, 2],
            4,
            |model| {
                let [image, kernel] = [&model.image, &model.kernel].map(|param| param.val());
                let options = ConvTransposeOptions::new([2, 2], [0, 0], [0, 0], [1, 1], 1);
                conv_transpose2d(image, kernel, Some(model.bias.val()), options)
            },
        ),
    ]
}

fn planar(model: &Convolution, groups: usize) -> Tensor<4> {
    let [image, kernel] = [&model.image, &model.kernel].map(|param| param.val());
    let options = ConvOptions::new([1, 1], [1, 1], [1, 1], groups);
    conv2d(image, kernel, Some(model.bias.val()), options)
}

/// Positive numbers up to 1: nothing cancels.
fn positive(elements: usize, seed: usize) -> Vec<f32> {
    (0..elements)
        .map(|i| ((i * 7919 + seed) % 1009) as f32 / 1009.0 + 1e-3)
        .collect()
}

impl Convolution {
    fn new(case: &Case, device: &Device) -> Self {
        let tensor = |shape: [usize; 4], seed| {
            let numbers = positive(shape.iter().product(), seed);
            Tensor::from_data(TensorData::new(numbers, shape), device)
        };
        let bias = positive(case.bias, 3);
        Self {
            image: Param::initialized(ParamId::new(), tensor(case.image, 1).require_grad()),
            kernel: Param::initialized(ParamId::new(), tensor(case.kernel, 2).require_grad()),
            bias: Param::initialized(
                ParamId::new(),
                Tensor::from_data(TensorData::new(bias, [case.bias]), device).require_grad(),
            ),
        }
    }

    /// The result, and the gradients of image, kernel and bias.
    fn step(&self, dtype: FloatDType, forward: Forward) -> [Vec<f32>; 4] {
        let autocast = Autocast::new(dtype);
        let y = autocast.run(self, (), |model, ()| forward(model)).unwrap();
        // Sums of gradients are of the size of 1,000.
        let grads = (y.clone().mean() * 1024.0).backward();
        [
            values(y),
            values(self.image.grad(&grads).unwrap()),
            values(self.kernel.grad(&grads).unwrap()),
            values(self.bias.grad(&grads).unwrap()),
        ]
    }
}

#[test]
fn no_term_is_lost() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let half = supported_dtypes(&target.device);
        for dtype in half.into_iter().filter(|dtype| *dtype != FloatDType::F32) {
            // All terms are positive: rounded are two operands, a product before a sum, and the result.
            let roundoff = if dtype == FloatDType::F16 {
                2f64.powi(-11)
            } else {
                2f64.powi(-8)
            };
            let bound = 4.0 * roundoff;
            for case in cases() {
                let model = Convolution::new(&case, &device);
                let exact = model.step(FloatDType::F32, case.forward);
                let found = model.step(dtype, case.forward);
                let names = ["result", "image", "kernel", "bias"];
                for ((exact, found), of) in exact.iter().zip(&found).zip(names) {
                    let distance = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).powi(2);
                    let error: f64 = exact.iter().zip(found).map(distance).sum();
                    let size: f64 = exact.iter().map(|x| f64::from(*x).powi(2)).sum();
                    let error = (error / size).sqrt();
                    assert!(
                        error <= bound,
                        "{} of {} in {dtype:?} on {}: {error}",
                        of,
                        case.name,
                        target.name
                    );
                }
            }
        }
    });
}

/// In a recurrent layer a weight is used once for each step.
#[test]
fn the_gradients_of_all_uses_of_a_weight_are_summed_in_f32() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let half = supported_dtypes(&target.device);
        for dtype in half.into_iter().filter(|dtype| *dtype != FloatDType::F32) {
            // From here on half precision does not count by ones.
            let large: f32 = if dtype == FloatDType::F16 {
                2048.0
            } else {
                256.0
            };
            let steps = [vec![large], vec![1.0; 8], vec![large]].concat();
            for way in ["layer", "view", "joined"] {
                let config = LinearConfig::new(1, 1).with_bias(false);
                let model = config.with_initializer(Initializer::Ones).init(&device);
                let x = Tensor::<2>::from_data(TensorData::new(steps.clone(), [10, 1]), &device);
                let loss = Autocast::new(dtype).run(&model, x, |model, x| {
                    let uses = (0..10usize).map(|step| {
                        let x = x.clone().slice([step..step + 1]);
                        let weight = model.weight.val();
                        match way {
                            "view" => x.matmul(weight.transpose()),
                            // Twice: each is half of it.
                            "joined" => {
                                let both = Tensor::cat(vec![weight.clone(), weight], 1);
                                x.matmul(both).mean_dim(1)
                            }
                            _ => model.forward(x),
                        }
                    });
                    uses.reduce(|a, b| a + b).unwrap().sum()
                });
                let grads = loss.unwrap().backward();
                let gradient = values(model.weight.grad(&grads).unwrap());
                assert_eq!(
                    gradient,
                    [2.0 * large + 8.0],
                    "{dtype:?} on {}, {way}",
                    target.name
                );
            }
        }
    });
}

#[test]
fn explain_says_which_convolutions_run_in_f32() {
    each_device(|target| {
        let device = target.device.clone().autodiff();
        let test = self_test(&target.device, FloatDType::F16);
        let Ok(test) = test else {
            return;
        };
        // Flex runs all products in F32, on operands in half.
        let adds_up_in_half = target.is_gpu() && test.convolution_of_4096_ones != 4096.0;
        let case = &cases()[0];
        let model = Convolution::new(case, &device);
        let operations = Autocast::new(FloatDType::F16)
            .explain(&model, (), |model, ()| (case.forward)(model))
            .unwrap();
        let convolution = operations.iter().find(|one| one.name == "conv2d").unwrap();
        assert_eq!(convolution.operands, Some(FloatDType::F16));
        assert_eq!(convolution.widened, adds_up_in_half, "{test:?}");
    });
}
