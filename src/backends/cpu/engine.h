// How the CPU backend multiplies. Two engines with one interface; forward and backward are templates over it.
//
//   Left   an M x K operand: gathered bf16 rows, or fp32 weights (P, dS) rounded to bf16, plain or transposed
//   Right  a K x N operand: bf16 rows, plain or transposed
//   multiply(left, right, c, ldc, accumulate)    c[M, N] (+)= left * right in fp32
//
// Operand values are bf16 in both engines, so their products are exact in fp32 and the engines differ only in the order
// of fp32 additions (and in subnormals, which AMX flushes). M, N and K are multiples of kPad; padding is zero.
#pragma once

#include <Eigen/Core>
#include <cstdint>

#include "backends/cpu/amx.h"
#include "backends/cpu/buffer.h"
#include "sparsemla/bfloat16.h"

namespace sparsemla::cpu {

using Part = amx::Part;

/// fp32 copies of the operands, multiplied by Eigen.
struct Fp32Engine {
  static constexpr const char* kName = "eigen-fp32";
  struct ThreadScope {};
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using View = Eigen::Map<Matrix, Eigen::Aligned64, Eigen::OuterStride<>>;

  /// Storage is row-major [rows, columns]; `transposed` says that the operand is its transpose.
  struct Operand {
    Operand() = default;
    explicit Operand(std::int64_t capacity) : storage(capacity) {}

    void set_rows(const BFloat16* source, std::int64_t num_rows, std::int64_t num_columns, std::int64_t ld) {
      reshape(num_rows, num_columns, false);
      for (std::int64_t i = 0; i < rows; ++i) {
        const BFloat16* from = source + i * ld;
        float* to = storage.get() + i * columns;
        for (std::int64_t j = 0; j < columns; ++j) to[j] = to_float(from[j]);
      }
    }
    void set_rows_transposed(const BFloat16* source, std::int64_t k, std::int64_t n, std::int64_t ld) {
      set_rows(source, n, k, ld);
      transposed = true;
    }
    void set_weights(const float* source, std::int64_t num_rows, std::int64_t num_columns, std::int64_t ld, Part part) {
      reshape(num_rows, num_columns, false);
      for (std::int64_t i = 0; i < rows; ++i) {
        const float* from = source + i * ld;
        float* to = storage.get() + i * columns;
        if (part == Part::kHigh) {
          for (std::int64_t j = 0; j < columns; ++j) to[j] = to_float(to_bfloat16(from[j]));
        } else {
          for (std::int64_t j = 0; j < columns; ++j) {
            to[j] = to_float(to_bfloat16(from[j] - to_float(to_bfloat16(from[j]))));
          }
        }
      }
    }
    void set_weights_transposed(const float* source, std::int64_t m, std::int64_t k, std::int64_t ld, Part part) {
      set_weights(source, k, m, ld, part);
      transposed = true;
    }

    [[nodiscard]] View view() const { return {storage.get(), rows, columns, Eigen::OuterStride<>(columns)}; }

    Buffer<float> storage;
    std::int64_t rows = 0;
    std::int64_t columns = 0;
    bool transposed = false;

   private:
    void reshape(std::int64_t num_rows, std::int64_t num_columns, bool is_transposed) {
      rows = num_rows;
      columns = num_columns;
      transposed = is_transposed;
    }
  };
  using Left = Operand;
  using Right = Operand;

  static void multiply(const Left& left, const Right& right, float* c, std::int64_t ldc, bool accumulate) {
    if (left.transposed) {
      multiply_by(left.view().transpose(), right, left.columns, c, ldc, accumulate);
    } else {
      multiply_by(left.view(), right, left.rows, c, ldc, accumulate);
    }
  }

 private:
  template <typename LeftExpression>
  static void multiply_by(const LeftExpression& left, const Right& right, std::int64_t m, float* c, std::int64_t ldc,
                          bool accumulate) {
    using Target = Eigen::Map<Matrix, Eigen::Unaligned, Eigen::OuterStride<>>;
    Target target(c, m, right.transposed ? right.rows : right.columns, Eigen::OuterStride<>(ldc));
    if (!accumulate) target.setZero();
    if (right.transposed) {
      target.noalias() += left * right.view().transpose();
    } else {
      target.noalias() += left * right.view();
    }
  }
};

/// bf16 operands in AMX tiles.
struct AmxEngine {
  static constexpr const char* kName = "amx-bf16";
  struct ThreadScope {
    ThreadScope() noexcept { amx::configure_thread(); }
    ~ThreadScope() { amx::release_thread(); }
    ThreadScope(const ThreadScope&) = delete;
    ThreadScope& operator=(const ThreadScope&) = delete;
  };

  struct Left {
    Left() = default;
    explicit Left(std::int64_t capacity) : storage(capacity) {}

    /// No copy: `source` must stay, 32-row padding included, until the product is done.
    void set_rows(const BFloat16* source, std::int64_t num_rows, std::int64_t num_columns, std::int64_t row_stride) {
      set(source, num_rows, num_columns, row_stride);
    }
    void set_weights(const float* source, std::int64_t m, std::int64_t k, std::int64_t source_stride, Part part) {
      amx::pack_left(source, source_stride, m, k, part, bits(storage.get()));
      set(storage.get(), m, k, k);
    }
    void set_weights_transposed(const float* source, std::int64_t m, std::int64_t k, std::int64_t source_stride,
                                Part part) {
      amx::pack_left_transposed(source, source_stride, m, k, part, bits(storage.get()));
      set(storage.get(), m, k, k);
    }

    Buffer<BFloat16> storage;
    const BFloat16* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t depth = 0;
    std::int64_t ld = 0;

   private:
    void set(const BFloat16* source, std::int64_t num_rows, std::int64_t num_columns, std::int64_t row_stride) {
      data = source;
      rows = num_rows;
      depth = num_columns;
      ld = row_stride;
    }
  };

  struct Right {
    Right() = default;
    explicit Right(std::int64_t capacity) : storage(capacity) {}

    void set_rows(const BFloat16* source, std::int64_t k, std::int64_t n, std::int64_t ld) {
      amx::pack_right(bits(source), ld, k, n, bits(storage.get()));
      columns = n;
    }
    void set_rows_transposed(const BFloat16* source, std::int64_t k, std::int64_t n, std::int64_t ld) {
      amx::pack_right_transposed(bits(source), ld, k, n, bits(storage.get()));
      columns = n;
    }

    Buffer<BFloat16> storage;
    std::int64_t columns = 0;
  };

  static void multiply(const Left& left, const Right& right, float* c, std::int64_t ldc, bool accumulate) {
    amx::multiply(bits(left.data), left.ld, bits(right.storage.get()), left.rows, right.columns, left.depth, c, ldc,
                  accumulate);
  }

 private:
  // BFloat16 is a struct of one uint16_t; amx.h speaks of raw bits so that its file shares no inline function.
  static const std::uint16_t* bits(const BFloat16* values) { return reinterpret_cast<const std::uint16_t*>(values); }
  static std::uint16_t* bits(BFloat16* values) { return reinterpret_cast<std::uint16_t*>(values); }
};

}  // namespace sparsemla::cpu
