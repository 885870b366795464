//! The state of an optimizer, loaded and held against its file.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{DType, Device};
use burn_lean_reparam::{catch_quietly, each_float};
use burn_pack::{MAX_FILE_SIZE, Reader, Tensor};

use super::files::{damaged, io_error};
use super::{MODEL, OPTIMIZER};
use crate::AmpError;

/// What parameters are stored as, by identity.
type Dtypes = HashMap<u64, DType>;

/// The parameters of a model.
#[derive(Debug, Default)]
pub(super) struct Parameters {
    dtypes: Dtypes,
    /// The default floats of the devices that they are on.
    defaults: HashSet<DType>,
}

impl Parameters {
    pub(super) fn of<M: Module>(model: &M) -> Self {
        let mut found = Self::default();
        each_float(model, |_, float| {
            found.dtypes.insert(float.id().val(), float.dtype());
            found.defaults.insert(default_float(&float.device()));
        });
        found
    }

    /// Whether states, their parameters and the defaults of devices all have one dtype: then none can have been loaded
    /// in another.
    fn are_all_as(&self, recorded: &[Tensor]) -> bool {
        let mut floats = recorded.iter().filter(|tensor| tensor.dtype.is_float());
        let Some(first) = floats.next() else {
            return true;
        };
        let dtype = first.dtype;
        let is_alike = |tensor: &Tensor| {
            let parameter = tensor.param_id.and_then(|id| self.dtypes.get(&id));
            tensor.dtype == dtype && parameter == Some(&dtype)
        };
        // Nothing was loaded on a default device that does not come up.
        let of_burn = || catch_quietly(|| default_float(&Device::default())).unwrap_or(dtype);
        is_alike(first)
            && floats.all(is_alike)
            && self.defaults.iter().all(|default| *default == dtype)
            && of_burn() == dtype
    }
}

fn default_float(device: &Device) -> DType {
    device.settings().float_dtype.into()
}

/// Loads the state of an optimizer, and checks that all of it was loaded, in a dtype that a step can take: Burn
/// leaves out what does not fit, and makes the rest in the default dtype of a device. `parameters` are
/// those that the state is for. Dtypes in files beyond [`MAX_FILE_SIZE`] are not checked.
pub(super) fn load_state(
    optim: ModuleOptimizer,
    state: OptimizerRecord,
    folder: &Path,
    parameters: &Parameters,
) -> Result<ModuleOptimizer, AmpError> {
    let expected = state.len();
    // Burn panics where its default device does not come up.
    let optim = catch_quietly(|| optim.load_record(state))
        .map_err(|reason| AmpError::OptimizerState { reason })?;
    let loaded = optim.to_record();
    match loaded.len() {
        found if found == expected => check_dtypes(loaded, folder, parameters).map(|()| optim),
        found => Err(damaged(
            &folder.join(OPTIMIZER),
            &format!(
                "of its {expected} tensors, {found} fit this optimizer: it is the state of another \
                 kind, or of groups that name identities, which are others in a new model: load it into an \
                 optimizer of that kind, or by `load_with`"
            ),
        )),
    }
}

fn check_dtypes(
    loaded: OptimizerRecord,
    folder: &Path,
    parameters: &Parameters,
) -> Result<(), AmpError> {
    let path = folder.join(OPTIMIZER);
    let Some(recorded) = header(&path)? else {
        return Ok(());
    };
    let paths = recorded.metadata().clone();
    let recorded = tensors(recorded, &path)?;
    // What was loaded shows its dtypes only in a copy of all of it.
    if parameters.are_all_as(&recorded) {
        return Ok(());
    }
    let model = folder.join(MODEL);
    let Some(stored) = header(&model)? else {
        return Ok(());
    };
    let stored = tensors(stored, &model)?;
    let stored: Dtypes = stored
        .iter()
        .filter_map(|tensor| Some((tensor.param_id?, tensor.dtype)))
        .collect();
    let loaded = loaded.into_bytes();
    let loaded = loaded.map_err(|error| damaged(&path, &error))?;
    let loaded = Reader::from_bytes(loaded).map_err(|error| damaged(&path, &error))?;
    let loaded = tensors(loaded, &path)?;
    let mut both = recorded.iter().zip(&loaded);
    let Some((was, is)) = both.find(|(was, is)| is_lost(was, is, &stored, &parameters.dtypes))
    else {
        return Ok(());
    };
    let parameter = was.param_id.and_then(|id| paths.get(&id.to_string()));
    Err(AmpError::OptimizerDtype {
        parameter: parameter.unwrap_or(&was.name).clone(),
        recorded: was.dtype,
        loaded: is.dtype,
    })
}

/// A state is to be loaded in the dtype that it was saved in; or, where that was the dtype of its parameter, in the
/// one that the parameter has now. Not every optimizer keeps states in the dtype of parameters.
fn is_lost(was: &Tensor, is: &Tensor, stored: &Dtypes, parameters: &Dtypes) -> bool {
    let of = |dtypes: &Dtypes| was.param_id.and_then(|id| dtypes.get(&id).copied());
    let follows = of(stored) == Some(was.dtype) && of(parameters) == Some(is.dtype);
    // Integers differ between backends.
    was.dtype.is_float() && was.dtype != is.dtype && !follows
}

/// What a file says that it holds; none of one that Burn reads from memory alone, for its size.
fn header(path: &Path) -> Result<Option<Reader>, AmpError> {
    let size = fs::metadata(path).map_err(|error| io_error("cannot read", path, &error))?;
    if size.len() > MAX_FILE_SIZE {
        return Ok(None);
    }
    let reader = Reader::from_file_exact(path);
    reader.map(Some).map_err(|error| damaged(path, &error))
}

/// The tensors of a file in the order of their names; their numbers are not read.
fn tensors(reader: Reader, path: &Path) -> Result<Vec<Tensor>, AmpError> {
    let tensors = reader.into_tensors();
    tensors.map_err(|error| damaged(path, &error))
}

#[cfg(test)]
mod tests {
    use burn::tensor::Bytes;
    use burn::tensor::DType::{BF16, F32, F64, I32, I64};

    use super::*;

    fn parameters(dtypes: [DType; 2], default: DType) -> Parameters {
        Parameters {
            dtypes: [1, 2].into_iter().zip(dtypes).collect(),
            defaults: [default].into(),
        }
    }

    fn states(dtypes: &[(u64, DType)]) -> Vec<Tensor> {
        let state = |(id, dtype): &(u64, DType)| {
            let empty = Bytes::from_bytes_vec(Vec::new());
            Tensor::new(format!("{id}.moment"), *dtype, vec![0], Some(*id), empty)
        };
        dtypes.iter().map(state).collect()
    }

    #[test]
    fn states_are_copied_only_where_a_dtype_can_have_changed() {
        let all = parameters([F32; 2], F32);
        assert!(all.are_all_as(&states(&[])));
        assert!(all.are_all_as(&states(&[(1, F32), (2, F32)])));
        assert!(all.are_all_as(&states(&[(1, I64), (1, F32), (2, I64)])));
        for dtypes in [[(1, F64), (2, F32)], [(1, F32), (2, F64)], [(1, BF16); 2]] {
            assert!(!all.are_all_as(&states(&dtypes)), "{dtypes:?}");
        }
        let both = states(&[(1, F32), (2, F32)]);
        assert!(!parameters([F32, F64], F32).are_all_as(&both));
        assert!(!parameters([F32; 2], BF16).are_all_as(&both));
        // Of a parameter that the model does not have.
        assert!(!all.are_all_as(&states(&[(3, F32)])));
    }

    #[test]
    fn a_state_follows_its_parameter_and_integers_their_backend() {
        let [narrow, wide] = [F32, F64].map(|dtype| Dtypes::from([(1, dtype)]));
        let is_lost = |was, is, stored, parameters| {
            let [was, is] = [was, is].map(|dtype| states(&[(1, dtype)]));
            is_lost(&was[0], &is[0], stored, parameters)
        };
        assert!(!is_lost(F64, F32, &wide, &narrow));
        assert!(is_lost(F64, F32, &wide, &wide));
        assert!(is_lost(F64, F32, &narrow, &narrow));
        assert!(!is_lost(F64, F64, &wide, &wide));
        assert!(!is_lost(I64, I32, &wide, &wide));
    }

    /// A hole: it takes no room on the disk.
    #[test]
    #[cfg(unix)]
    fn a_file_beyond_the_limit_is_not_taken_for_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(OPTIMIZER);
        // Nothing is in it yet.
        let file = fs::File::create(&path).unwrap();
        assert!(matches!(header(&path), Err(AmpError::Record { .. })));
        file.set_len(MAX_FILE_SIZE + 1).unwrap();
        assert!(matches!(header(&path), Ok(None)));
    }
}
