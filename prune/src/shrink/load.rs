//! Records of shrunk models.

use std::collections::HashMap;

use burn::module::{Module, Param};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::{Shape, Tensor};
use burn_lean_reparam::{PathMapper, Rejected, Trail, Training, map_with_path};

use crate::PruneError;

/// Loads the record of a shrunk model into a new model of the original sizes, whose parameters become
/// as small as those of the record; Burn's own `load_record` refuses other shapes. Numbers that
/// [`Shrink::shrink_resizing`](crate::Shrink::shrink_resizing) set are in no record: set them again.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::store::ModuleRecord;
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_lean_prune::{Shrink, load_shrunk};
///
/// let device = Device::flex();
/// let new = || -> Vec<Linear> {
///     [(4, 64), (64, 2)].map(|(i, o)| LinearConfig::new(i, o).init(&device)).to_vec()
/// };
/// let forward = |model: &Vec<Linear>, x: Tensor<2>| model[1].forward(model[0].forward(x));
/// let x = || Tensor::<2>::ones([1, 4], &device);
/// let small = Shrink::to(0.25).shrink(new(), forward, x())?.model;
/// let expected = forward(&small, x());
///
/// let file = small.into_record().into_bytes()?;
/// let loaded = load_shrunk(new(), ModuleRecord::from_bytes(file)?)?;
/// assert!(loaded[0].weight.dims()[1] <= 16);
/// let close = Tolerance::<f32>::absolute(1e-6);
/// forward(&loaded, x()).into_data().assert_approx_eq(&expected.into_data(), close);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// The model comes back in the error, unchanged.
/// - [`PruneError::RecordOfAnotherModel`] for a parameter of another rank, or with more along an axis
///   than the model has.
/// - [`PruneError::Record`] where Burn refuses the record: parameters are missing, or of other kinds.
pub fn load_shrunk<M: Module>(
    model: M,
    record: ModuleRecord,
) -> Result<M, Rejected<M, PruneError>> {
    loaded(&model, record).map_err(|error| Rejected::new(model, error))
}

fn loaded<M: Module>(model: &M, record: ModuleRecord) -> Result<M, PruneError> {
    let mut fit = Fit {
        recorded: shapes(&record)?,
        refused: None,
    };
    // Clones share running statistics; `valid` copies them.
    let fitted = map_with_path(model.valid(), &mut fit);
    if let Some(error) = fit.refused {
        return Err(error);
    }
    let loaded = fitted.try_load_record(record).map_err(refused)?;
    Ok(Training::of(model).restore(loaded))
}

fn refused(error: RecordError) -> PruneError {
    PruneError::Record {
        what: "the record of a shrunk model".into(),
        reason: error.to_string(),
    }
}

/// The shape of each tensor of a record, by path.
fn shapes(record: &ModuleRecord) -> Result<HashMap<String, Vec<usize>>, PruneError> {
    let refused_pack = |error: burn_pack::Error| refused(error.into());
    let bytes = record.clone().into_bytes().map_err(refused)?;
    let reader = burn_pack::Reader::from_bytes(bytes).map_err(refused_pack)?;
    let tensors = reader.into_tensors().map_err(refused_pack)?;
    let shapes = tensors.into_iter().map(|tensor| {
        let (path, _, shape, _, _) = tensor.into_parts().map_err(refused_pack)?;
        Ok((path, shape.to_vec()))
    });
    shapes.collect()
}

/// Gives each parameter the shape that it has in the record, without a value: the record has it.
struct Fit {
    recorded: HashMap<String, Vec<usize>>,
    refused: Option<PruneError>,
}

impl PathMapper for Fit {
    fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = at.path();
        let Some(recorded) = self.recorded.get(&path) else {
            return param;
        };
        let own = param.transform_for_save().shape().to_vec();
        let fits =
            recorded.len() == D && recorded.iter().zip(&own).all(|(small, own)| small <= own);
        if !fits {
            self.refused
                .get_or_insert(PruneError::RecordOfAnotherModel {
                    path,
                    record: Some(recorded.clone()),
                    model: Some(own),
                });
            return param;
        }
        // A parameter without autodiff tells whether it is to be trained only where it is.
        let trains = param.clone().train().is_require_grad();
        let device = param.lazy_device();
        let shape = Shape::from(recorded.clone());
        let (id, _, mapper) = param.consume();
        let (save, load) = (mapper.clone(), mapper);
        let zeros = shape.clone();
        Param::uninitialized(
            id,
            move |device, trains| Tensor::zeros(zeros, device).set_require_grad(trains),
            device,
            trains,
            shape,
        )
        .save_mapper(move |weight| save.on_save(weight))
        .load_mapper(move |weight| load.on_load(weight))
    }
}
