//! Walks through a model that know where they are.
//!
//! Burn's visitors and mappers are told which modules they enter and leave, and have to remember them.

use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Int, Tensor};

/// The way from a model to one of its parameters.
#[derive(Debug, Clone, Default)]
pub struct Trail {
    names: Vec<String>,
    containers: Vec<String>,
}

impl Trail {
    /// The path, for example `encoder.0.weight`.
    pub fn path(&self) -> String {
        self.names.join(".")
    }

    /// The parts of the path.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// What each part is in, as Burn calls it: `Struct:Linear`, `Vec`, `Reparameterization`.
    pub fn containers(&self) -> &[String] {
        &self.containers
    }

    /// The last part of the path, for example `weight`.
    pub fn name(&self) -> &str {
        self.names.last().map_or("", String::as_str)
    }

    /// What the last part is in.
    pub fn container(&self) -> &str {
        self.containers.last().map_or("", String::as_str)
    }

    /// Whether any part is in this container.
    pub fn is_inside(&self, container: &str) -> bool {
        self.containers.iter().any(|around| around == container)
    }

    /// Whether the parameter belongs to a reparameterization.
    pub fn is_attached(&self) -> bool {
        self.is_inside("Reparameterization")
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_string());
        self.containers.push(container.to_string());
    }

    fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }
}

/// Burn's [`ModuleVisitor`], told the way to each parameter.
pub trait PathVisitor {
    /// As [`ModuleVisitor::visit_float`].
    fn float<const D: usize>(&mut self, _at: &Trail, _param: &Param<Tensor<D>>) {}

    /// As [`ModuleVisitor::visit_int`].
    fn int<const D: usize>(&mut self, _at: &Trail, _param: &Param<Tensor<D, Int>>) {}

    /// As [`ModuleVisitor::visit_bool`].
    fn bool<const D: usize>(&mut self, _at: &Trail, _param: &Param<Tensor<D, Bool>>) {}

    /// As [`ModuleVisitor::visit_flag`].
    fn flag(&mut self, _at: &Trail, _flag: &Param<Flag>) {}
}

/// Burn's [`ModuleMapper`], told the way to each parameter.
pub trait PathMapper {
    /// As [`ModuleMapper::map_float`].
    fn float<const D: usize>(&mut self, _at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param
    }

    /// As [`ModuleMapper::map_int`].
    fn int<const D: usize>(
        &mut self,
        _at: &Trail,
        param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        param
    }

    /// As [`ModuleMapper::map_bool`].
    fn bool<const D: usize>(
        &mut self,
        _at: &Trail,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param
    }

    /// As [`ModuleMapper::map_flag`].
    fn flag(&mut self, _at: &Trail, flag: Param<Flag>) -> Param<Flag> {
        flag
    }
}

/// A kind of tensor by the name that visitors and mappers have for it.
#[doc(hidden)]
#[macro_export]
macro_rules! kind {
    (float) => {
        ::burn::tensor::Float
    };
    (int) => {
        ::burn::tensor::Int
    };
    (bool) => {
        ::burn::tensor::Bool
    };
}

/// Methods of a [`PathVisitor`] that do the same with parameters of several kinds.
#[doc(hidden)]
#[macro_export]
macro_rules! visit_kinds {
    ($($name:ident),+: |$self:ident, $at:ident, $param:pat_param| $visited:expr) => {$(
        fn $name<const D: usize>(
            &mut $self,
            $at: &$crate::Trail,
            $param: &::burn::module::Param<::burn::tensor::Tensor<D, $crate::kind!($name)>>,
        ) {
            $visited
        }
    )+};
}

/// Methods of a [`PathMapper`] that do the same with parameters of several kinds.
#[doc(hidden)]
#[macro_export]
macro_rules! map_kinds {
    ($($name:ident),+: |$self:ident, $at:ident, $param:ident| $mapped:expr) => {$(
        fn $name<const D: usize>(
            &mut $self,
            $at: &$crate::Trail,
            $param: ::burn::module::Param<::burn::tensor::Tensor<D, $crate::kind!($name)>>,
        ) -> ::burn::module::Param<::burn::tensor::Tensor<D, $crate::kind!($name)>> {
            $mapped
        }
    )+};
}

/// Shows every parameter of `model` to `visitor`, in module order.
pub fn visit_with_path<M: Module, V: PathVisitor>(model: &M, visitor: &mut V) {
    model.visit(&mut Follow::new(visitor));
}

/// Has every parameter of `model` mapped by `mapper`, in module order.
///
/// ```
/// use burn::module::Param;
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_lean_reparam::{PathMapper, Trail, map_with_path};
///
/// struct ZeroBiases;
///
/// impl PathMapper for ZeroBiases {
///     fn float<const D: usize>(&mut self, at: &Trail, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
///         match at.name() {
///             "bias" => param.map(|bias| bias.zeros_like()),
///             _ => param,
///         }
///     }
/// }
///
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// let linear = map_with_path(linear, &mut ZeroBiases);
/// assert_eq!(linear.bias.unwrap().val().abs().sum().into_scalar::<f32>(), 0.0);
/// ```
pub fn map_with_path<M: Module, V: PathMapper>(model: M, mapper: &mut V) -> M {
    model.map(&mut Follow::new(mapper))
}

/// Keeps the trail of a walk.
struct Follow<'a, V> {
    at: Trail,
    follower: &'a mut V,
}

impl<'a, V> Follow<'a, V> {
    fn new(follower: &'a mut V) -> Self {
        Self {
            at: Trail::default(),
            follower,
        }
    }
}

impl<V: PathVisitor> ModuleVisitor for Follow<'_, V> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.at.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.at.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.follower.float(&self.at, param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.follower.int(&self.at, param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.follower.bool(&self.at, param);
    }

    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.follower.flag(&self.at, flag);
    }
}

impl<V: PathMapper> ModuleMapper for Follow<'_, V> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.at.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.at.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.follower.float(&self.at, param)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.follower.int(&self.at, param)
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.follower.bool(&self.at, param)
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        self.follower.flag(&self.at, flag)
    }
}
