//! Integers of 8 and 16 bits among the inputs, constants and results of a model, as a cache of codes has them.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};
use burn_lean::deploy::{Backend, EngineConfig, Export, Form};

use crate::judge::{close, for_the_judge};
use crate::support::{tensor, with_numbers};

#[derive(Module, Debug)]
struct Decoder {
    fc: Linear,
}

const STEP: f32 = 1.0 / 64.0;

impl Decoder {
    /// Rows behind those of the cache, which are kept as codes.
    fn forward(&self, (x, cache): (Tensor<2>, Tensor<2, Int>)) -> (Tensor<2>, Tensor<2, Int>) {
        let dtype = cache.dtype();
        let codes = x.div_scalar(STEP).round().clamp(0.0, 127.0).int();
        let one = Tensor::<2, Int>::from_data([[1, 2, 3, 4, 5, 6]], &cache.device());
        let [codes, one] = [codes, one].map(|codes| codes.cast(dtype));
        let cache = Tensor::cat(vec![one, cache, codes], 0);
        let rows = cache.clone().float().mul_scalar(STEP);
        (self.fc.forward(rows), cache)
    }
}

#[test]
fn a_cache_of_codes_is_computed_by_every_backend_and_keeps_its_dtype() {
    let device = Device::flex();
    let decoder = Decoder {
        fc: with_numbers(LinearConfig::new(6, 4).init(&device), 3),
    };
    let x = tensor::<2>(5, [2, 6], &device);
    for dtype in [IntDType::I8, IntDType::U8, IntDType::I16] {
        let codes: Vec<i32> = (0..18).map(|code| code * 7 % 128).collect();
        let cache = Tensor::<2, Int>::from_data(TensorData::new(codes, [3, 6]), &device);
        let inputs = (x.clone(), cache.cast(dtype));
        let (expected, expected_cache) = decoder.forward(inputs.clone());
        assert_eq!(expected_cache.dtype(), DType::from(dtype));
        let record = || Export::record(&decoder, &inputs, Decoder::forward).unwrap();
        for backend in [Backend::Own, Backend::Rten, Backend::Burn] {
            let config = EngineConfig::new().with_backend(Some(backend));
            let engine = config.compile(record()).unwrap();
            let (found, cache) = engine.run(&inputs).unwrap();
            close(found, expected.clone());
            assert_eq!(cache.dtype(), expected_cache.dtype(), "{backend}");
            cache
                .into_data()
                .assert_eq(&expected_cache.clone().into_data(), true);
        }
        let exported = record().to_onnx(Form::Float).unwrap();
        let element = format!("{:?}", exported.model.inputs()[1].element);
        assert_eq!(
            element,
            format!("{dtype:?}"),
            "a file has what was recorded"
        );
        for_the_judge(&exported, &inputs, &expected, None);
    }
}
