#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <pthread.h>
#include <immintrin.h>
// Sequential reads of MIB mebibytes by THREADS threads, best of seven. Args: MIB THREADS
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+1e-9*t.tv_nsec;}
static char*buf;static size_t n;static int T;
static void*rd(void*a){long id=(long)a;size_t c=n/T;char*p=buf+id*c;__m256i s0=_mm256_setzero_si256(),s1=s0,s2=s0,s3=s0;
 for(size_t i=0;i<c;i+=128){s0=_mm256_xor_si256(s0,_mm256_loadu_si256((const __m256i*)(p+i)));s1=_mm256_xor_si256(s1,_mm256_loadu_si256((const __m256i*)(p+i+32)));s2=_mm256_xor_si256(s2,_mm256_loadu_si256((const __m256i*)(p+i+64)));s3=_mm256_xor_si256(s3,_mm256_loadu_si256((const __m256i*)(p+i+96)));}
 s0=_mm256_xor_si256(_mm256_xor_si256(s0,s1),_mm256_xor_si256(s2,s3));volatile long long x=((long long*)&s0)[0];(void)x;return 0;}
int main(int c,char**v){n=atol(v[1])<<20;T=atoi(v[2]);buf=aligned_alloc(4096,n);memset(buf,1,n);
 double best=1e9;for(int r=0;r<7;r++){double t=now();pthread_t th[8];for(long i=0;i<T;i++)pthread_create(&th[i],0,rd,(void*)i);for(int i=0;i<T;i++)pthread_join(th[i],0);t=now()-t;if(t<best)best=t;}
 printf("read %zu MiB %d threads: %.2f GB/s\n",n>>20,T,n/best/1e9);}
